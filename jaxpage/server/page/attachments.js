// Pictures for the next message: chosen, dropped or pasted. They go to the server as data URLs.

import { announce, button, byId, make } from "./dom.js";

export class Attachments {
  /** `onChange()` is called when there are others. */
  constructor({ onChange }) {
    this.pictures = []; // data URLs
    this.onChange = onChange;
    const field = byId("files");
    byId("attach").addEventListener("click", () => field.click());
    field.addEventListener("change", () => {
      this.#add(field.files);
      field.value = ""; // the same file may be chosen again
    });
    byId("prompt").addEventListener("paste", (event) => {
      if (event.clipboardData.files.length === 0) return; // text
      event.preventDefault();
      this.#add(event.clipboardData.files);
    });
    const chat = byId("chat");
    chat.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    chat.addEventListener("drop", (event) => {
      if (event.dataTransfer.files.length === 0) return;
      event.preventDefault();
      this.#add(event.dataTransfer.files);
    });
  }

  /** The pictures, which are those of a message from now on. */
  take() {
    const taken = this.pictures;
    this.pictures = [];
    this.#draw();
    return taken;
  }

  async #add(files) {
    // A copy: the list is emptied when the event is over.
    for (const file of [...files]) {
      if (!file.type.startsWith("image/")) announce(`${file.name} is no picture.`);
      else this.pictures.push(await dataUrl(file));
    }
    this.#draw();
  }

  #draw() {
    const list = byId("pictures");
    list.replaceChildren(...this.pictures.map((url, i) => make("li", {},
      make("img", { src: url, alt: `Picture ${i + 1}` }),
      button("Remove", () => this.#remove(i), { class: "quiet small", "aria-label": `Remove picture ${i + 1}` }))));
    list.hidden = this.pictures.length === 0;
    this.onChange();
  }

  #remove(index) {
    this.pictures.splice(index, 1);
    this.#draw();
    byId("attach").focus();
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
