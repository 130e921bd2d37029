// The chat: asks, streams, stops, and shows what came.

import { call } from "./api.js";
import { Attachments } from "./attachments.js";
import { isLeftOut, newAnswer, take, toRequest } from "./conversation.js";
import { announce, byId, setText } from "./dom.js";
import { AnswerView, UserView } from "./message.js";
import { chunks } from "./sse.js";
import { hideTip } from "./tokens.js";

const MOST_ANNOUNCED = 1000; // characters of an answer

export class Chat {
  /** `page`: `model`, `settings`, and what to do about a refused key and a faulty setting. */
  constructor(page) {
    this.page = page;
    this.messages = [];
    this.views = [];
    this.cleared = null; // to be brought back by Undo
    this.running = null; // the AbortController of the answer that comes
    this.isFrameAsked = false;
    this.isAtEnd = true;
    this.prompt = byId("prompt");
    this.log = byId("log");
    this.attachments = new Attachments({ onChange: () => this.#updateButtons() });
    this.#listen();
    this.#update();
  }

  /** The ids of requests that this page made. */
  get ownIds() {
    return new Set(this.messages.map((message) => message.id).filter(Boolean));
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.prompt.addEventListener("keydown", (event) => this.#onKey(event));
    this.prompt.addEventListener("input", () => {
      this.#fitPrompt();
      this.#updateButtons();
    });
    byId("stop-button").addEventListener("click", () => this.running?.abort());
    byId("clear").addEventListener("click", () => this.#clear());
    byId("undo").addEventListener("click", () => this.#undo());
    byId("to-end").addEventListener("click", () => {
      this.log.scrollTop = this.log.scrollHeight;
    });
    this.log.addEventListener("scroll", () => {
      hideTip();
      this.isAtEnd = this.log.scrollTop + this.log.clientHeight > this.log.scrollHeight - 40;
      byId("to-end").hidden = this.isAtEnd;
    });
  }

  #onKey(event) {
    if (event.key === "Escape" && this.running) this.running.abort();
    if (event.key !== "Enter" || event.isComposing) return;
    // A phone's keyboard has no Shift+Enter; there the button sends.
    const isTouch = matchMedia("(pointer: coarse)").matches;
    if (event.ctrlKey || event.metaKey || (!event.shiftKey && !isTouch)) {
      event.preventDefault();
      this.#send();
    }
  }

  #send() {
    const text = this.prompt.value;
    if (this.running || this.#isNothingToSend() || !this.#isReady()) return;
    this.prompt.value = "";
    this.#fitPrompt();
    this.#push({ role: "user", content: text, pictures: this.attachments.take() });
    this.#answer();
  }

  #isNothingToSend() {
    return this.prompt.value.trim() === "" && this.attachments.pictures.length === 0;
  }

  #isReady() {
    return this.page.model() !== "" && this.page.checkSettings();
  }

  /** Ask again from the message at `index` on; what comes after it goes. */
  #askAgain(index, content) {
    if (this.running || !this.#isReady()) return;
    const { pictures } = this.messages[index];
    this.#truncate(index);
    if (content !== undefined) this.#push({ role: "user", content, pictures });
    this.#answer();
    this.prompt.focus();
  }

  async #answer() {
    const { settings } = this.page;
    const answer = newAnswer();
    const body = {
      model: this.page.model(),
      messages: toRequest(this.messages, settings.system),
      ...settings.toRequest(),
      stream: true,
      stream_options: { include_usage: true },
    };
    this.cleared = null;
    this.isAtEnd = true;
    this.running = new AbortController();
    this.#push(answer);
    this.#update();
    try {
      const { signal } = this.running;
      const response = await call("v1/chat/completions", { body, signal });
      for await (const chunk of chunks(response.body)) {
        take(answer, chunk);
        this.#askFrame();
      }
    } catch (error) {
      this.#fail(answer, error);
    }
    answer.isRunning = false;
    answer.ended = performance.now();
    this.running = null;
    const hadFocus = document.activeElement === byId("stop-button");
    this.#update();
    if (hadFocus) this.prompt.focus(); // the button is gone
    this.#announce(answer);
  }

  #fail(answer, error) {
    if (this.running.signal.aborted) answer.isStopped = true;
    else answer.error = error;
    if (error.status === 401) this.page.askForKey();
  }

  #announce(answer) {
    // An error is an alert of its own.
    if (answer.error || !this.messages.includes(answer)) return;
    const calls = answer.toolCalls.map((toolCall) => `Call of ${toolCall.name}.`).join(" ");
    const text = `${answer.content} ${calls}`.trim();
    const shown = text.length > MOST_ANNOUNCED ? `${text.slice(0, MOST_ANNOUNCED)} … and more` : text;
    announce(`${answer.isStopped ? "Stopped." : "Answer:"} ${shown}`);
  }

  // Messages and their elements.

  #push(message) {
    const index = this.messages.push(message) - 1;
    const view = message.role === "user"
      ? new UserView(message, { onEdit: (text) => this.#askAgain(index, text) })
      : new AnswerView(message, {
        onRegenerate: () => this.#askAgain(index),
        onResults: () => this.#sendResults(),
      });
    this.views.push(view);
    byId("messages").append(view.element);
  }

  #sendResults() {
    if (this.running || !this.#isReady()) return;
    this.#answer();
    this.prompt.focus();
  }

  #truncate(length) {
    this.messages.length = length;
    for (const view of this.views.splice(length)) view.element.remove();
  }

  #clear() {
    this.running?.abort();
    this.cleared = this.messages.slice();
    this.#truncate(0);
    this.#update();
    announce("Conversation cleared.");
    byId("undo").focus();
  }

  #undo() {
    const messages = this.cleared ?? [];
    this.cleared = null;
    this.#truncate(0);
    for (const message of messages) this.#push(message);
    this.#update();
    this.prompt.focus();
  }

  // Drawing.

  #askFrame() {
    if (this.isFrameAsked) return;
    this.isFrameAsked = true;
    requestAnimationFrame(() => {
      this.isFrameAsked = false;
      this.#updateView(this.views.length - 1);
      this.#follow();
    });
  }

  #update() {
    this.views.forEach((_, i) => this.#updateView(i));
    this.#updateButtons();
    this.#follow();
  }

  #updateView(index) {
    this.views[index]?.update({
      isBusy: this.running !== null,
      isLast: index === this.views.length - 1,
      isLeftOut: this.messages[index].role === "user" && isLeftOut(this.messages, index),
    });
  }

  #updateButtons() {
    const isBusy = this.running !== null;
    const isEmpty = this.messages.length === 0;
    byId("send").hidden = isBusy;
    byId("send").disabled = this.#isNothingToSend() || this.page.model() === "";
    byId("stop-button").hidden = !isBusy;
    byId("clear").disabled = isEmpty;
    byId("undo").hidden = !this.cleared?.length || !isEmpty;
    byId("welcome").hidden = !isEmpty;
    setText(byId("prompt-hint"), isBusy ? "Escape stops the answer." : "Enter sends, Shift+Enter begins a new line.");
  }

  /** To be called when there is another model to ask. */
  modelChanged() {
    this.#updateButtons();
  }

  /** Stay at the end while the user is there. */
  #follow() {
    if (this.isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  #fitPrompt() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight + 2, 200)}px`;
  }
}
