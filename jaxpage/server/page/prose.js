// A growing text with code fences, as elements. No other markup: what a model writes is shown as it wrote it.

import { make } from "./dom.js";

const FENCE = /^ {0,3}```+ *([\w+#.-]*)[^`]*$/;
const MAYBE_FENCE = /^ {0,3}`{0,3}$|^ {0,3}```[^\n]*$/;

/** Text between fences goes to `p` elements that keep line breaks, text within to `pre`. */
export class Prose {
  constructor() {
    this.element = make("div", { class: "prose" });
    this.length = 0; // characters taken in
    this.line = ""; // the last line, held back as long as it may be a fence
    this.block = null; // the text node that grows
    this.isCode = false;
    this.isRestShown = false; // part of the last line is shown, so it is no fence
  }

  /** Show so much of a text that only grew since the last call. */
  update(text, { isFinal }) {
    const lines = (this.line + text.slice(this.length)).split("\n");
    this.length = text.length;
    this.line = lines.pop();
    for (const line of lines) this.#finishLine(line);
    if (this.line && (isFinal || !MAYBE_FENCE.test(this.line))) this.#showRest(isFinal);
  }

  #finishLine(line) {
    const fence = this.isRestShown ? null : FENCE.exec(line);
    if (fence) this.#toggle(fence[1]);
    else this.#append(`${line}\n`);
    this.isRestShown = false;
  }

  /** The beginning of a line that is no fence need not wait for its end. */
  #showRest(isFinal) {
    if (isFinal && !this.isRestShown && FENCE.test(this.line)) {
      if (!this.isCode) this.#append(this.line);
    } else this.#append(this.line);
    this.line = "";
    this.isRestShown = true;
  }

  #toggle(language) {
    this.isCode = !this.isCode;
    this.block = null;
    if (this.isCode) {
      this.block = document.createTextNode("");
      const block = make("pre", { class: "fence", tabIndex: 0 }, make("code", {}, this.block));
      if (language) block.dataset.language = language;
      this.element.append(block);
    }
  }

  #append(text) {
    if (this.block === null) {
      if (!text.trim()) return; // empty lines around a fence
      this.block = document.createTextNode("");
      this.element.append(make("p", {}, this.block));
    }
    this.block.appendData(text);
  }
}
