// Messages as elements.

import { isEmpty, summary } from "./conversation.js";
import { button, make, setText } from "./dom.js";
import { isJson, jsonBlock } from "./json.js";
import { Prose } from "./prose.js";
import { Tokens } from "./tokens.js";

/** What the user said. `onEdit(text)` is called with another text; without it there is no way to edit. */
export class UserView {
  constructor(message, { onEdit }) {
    this.message = message;
    this.body = make("div", { class: "prose" }, make("p", {}, message.content));
    const pictures = (message.pictures ?? []).map((src, i) => make("img", { src, alt: `Picture ${i + 1}` }));
    this.pictures = make("div", { class: "pictures" }, ...pictures);
    this.pictures.hidden = pictures.length === 0;
    this.editButton = button("Edit", () => this.#edit(), { class: "quiet small" });
    this.leftOut = make("p", { class: "hint" }, "Was not answered; the model is not told of it.");
    this.leftOut.hidden = true;
    this.onEdit = onEdit;
    this.element = make("li", { class: "message user" },
      make("div", { class: "message-head" }, make("h3", {}, "You"), this.editButton),
      this.pictures, this.body, this.leftOut);
  }

  update({ isBusy, isLeftOut }) {
    this.editButton.disabled = isBusy;
    this.leftOut.hidden = !isLeftOut;
  }

  #edit() {
    const field = make("textarea", { value: this.message.content, rows: 3, "aria-label": "Your message" });
    const close = () => {
      form.replaceWith(this.body);
      this.editButton.hidden = false;
      this.editButton.focus();
    };
    const form = make("form", { class: "edit" }, field, make("div", { class: "buttons" },
      button("Cancel", close, { class: "quiet" }),
      make("button", { type: "submit", class: "primary" }, "Ask again")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim() || !this.pictures.hidden) this.onEdit(field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.body.replaceWith(form);
    this.editButton.hidden = true;
    field.focus();
  }
}

/** What the model said: reasoning, text (as prose, JSON or tokens), calls of tools, and how it ended. */
export class AnswerView {
  constructor(answer, { onRegenerate, onResults }) {
    this.answer = answer;
    this.shown = null; // "text", "json" or "tokens"
    this.chosen = null; // by the user
    this.prose = new Prose();
    this.tokens = new Tokens();
    this.reasoning = new ReasoningView();
    this.body = make("div", { class: "body" });
    this.calls = make("div", { class: "calls" });
    this.callViews = [];
    this.error = make("div", { class: "error", role: "alert" });
    this.error.hidden = true;
    this.views = make("div", { class: "switch", role: "group", "aria-label": "Show the answer as" });
    this.regenerate = button("Regenerate", onRegenerate, { class: "quiet small" });
    this.copy = button("Copy", () => this.#copy(), { class: "quiet small" });
    this.copy.hidden = !navigator.clipboard;
    this.numbers = make("p", { class: "numbers-line" });
    this.results = make("form", { class: "results" },
      make("button", { type: "submit", class: "primary" }, "Send results"));
    this.results.hidden = true;
    this.results.addEventListener("submit", (event) => {
      event.preventDefault();
      onResults();
    });
    this.element = make("li", { class: "message assistant" },
      make("div", { class: "message-head" }, make("h3", {}, "Model")),
      this.reasoning.element, this.body, this.results, this.error,
      make("div", { class: "actions" }, this.regenerate, this.copy, this.views, this.numbers));
    this.results.prepend(this.calls);
  }

  /** `isLast`: results of tools may still be given. */
  update({ isBusy, isLast }) {
    const answer = this.answer;
    this.element.classList.toggle("running", answer.isRunning);
    this.element.setAttribute("aria-busy", String(answer.isRunning));
    this.reasoning.update(answer);
    this.#updateBody();
    this.#updateCalls(isBusy, isLast);
    this.#updateError();
    this.regenerate.hidden = this.copy.hidden = answer.isRunning;
    this.regenerate.disabled = isBusy;
    setText(this.regenerate, answer.error ? "Try again" : "Regenerate");
    this.copy.hidden ||= !navigator.clipboard || !answer.content;
    setText(this.numbers, summary(answer));
  }

  #updateBody() {
    const answer = this.answer;
    const available = this.#available();
    const preferred = answer.tokens.length ? "tokens" : available.at(-1);
    const shown = available.includes(this.chosen) ? this.chosen : preferred;
    if (shown === "tokens") this.tokens.update(answer.tokens);
    if (shown === "text") this.prose.update(answer.content, { isFinal: !answer.isRunning });
    if (shown !== this.shown) {
      this.shown = shown;
      const element = { text: () => this.prose.element, tokens: () => this.tokens.element, json: () => jsonBlock(answer.content) }[shown]();
      this.body.replaceChildren(element);
    }
    this.#updateSwitch(available);
  }

  /** The ways in which the answer can be shown. */
  #available() {
    const { content, tokens, isRunning } = this.answer;
    const available = ["text"];
    if (tokens.length) available.push("tokens");
    if (!isRunning && isJson(content)) available.push("json");
    return available;
  }

  #updateSwitch(available) {
    this.views.hidden = available.length < 2 || this.answer.isRunning;
    if (this.views.hidden) return;
    const names = { text: "Text", tokens: "Tokens", json: "JSON" };
    if (this.views.children.length !== available.length) {
      this.views.replaceChildren(...available.map((view) => button(names[view], () => {
        this.chosen = view;
        this.#updateBody();
      }, { class: "small", "data-view": view })));
    }
    for (const child of this.views.children) {
      child.setAttribute("aria-pressed", String(child.dataset.view === this.shown));
    }
  }

  #updateCalls(isBusy, isLast) {
    const { toolCalls, isRunning } = this.answer;
    this.results.hidden = toolCalls.length === 0;
    for (const call of toolCalls.slice(this.callViews.length)) {
      if (!call) return; // a later one came first
      const view = new CallView(call, this.callViews.length);
      this.callViews.push(view);
      this.calls.append(view.element);
    }
    const mayAnswer = isLast && !isRunning;
    for (const view of this.callViews) view.update({ isRunning, mayAnswer });
    const submit = this.results.lastElementChild;
    submit.hidden = !mayAnswer;
    submit.disabled = isBusy;
  }

  #updateError() {
    const { error } = this.answer;
    this.error.hidden = error === null;
    if (error !== null && this.error.childElementCount === 0) {
      const where = error.param ? ` (field ${error.param})` : "";
      this.error.append(make("p", {}, `${error.message}${where}`));
      if (error.retryAfter) this.error.append(make("p", {}, `Try again in ${error.retryAfter} s.`));
    }
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(this.answer.content);
      setText(this.copy, "Copied");
    } catch {
      setText(this.copy, "Not allowed");
    }
    setTimeout(() => setText(this.copy, "Copy"), 1500);
  }
}

/** Open while there is nothing else to read, unless the user says otherwise. */
class ReasoningView {
  constructor() {
    this.text = document.createTextNode("");
    this.title = make("summary", {}, "Reasoning");
    this.element = make("details", { class: "reasoning" }, this.title, make("p", {}, this.text));
    this.element.hidden = true;
    this.isUsers = false; // opened or closed by hand
    this.title.addEventListener("click", () => { this.isUsers = true; });
  }

  update(answer) {
    this.element.hidden = answer.reasoning === "";
    this.text.appendData(answer.reasoning.slice(this.text.length));
    const isAlone = answer.isRunning && isOnlyReasoning(answer);
    setText(this.title, isAlone ? "Reasoning…" : "Reasoning");
    if (!this.isUsers && this.element.open !== isAlone) this.element.open = isAlone;
  }
}

const isOnlyReasoning = (answer) => isEmpty({ ...answer, reasoning: "" });

/** A call of a tool: its name, its arguments, and a field for what it returned. */
class CallView {
  constructor(call, index) {
    this.call = call;
    this.isWhole = false;
    this.name = make("code", {}, call.name);
    this.arguments = make("pre", { class: "json" }, "");
    const id = `result-${call.id || index}`;
    this.result = make("textarea", { id, rows: 2, class: "code", required: true, spellcheck: false, value: call.result });
    this.result.addEventListener("input", () => { call.result = this.result.value; });
    this.element = make("div", { class: "call" },
      make("p", { class: "call-name" }, "Call of ", this.name),
      this.arguments,
      make("label", { for: id }, "Result"), this.result);
  }

  update({ isRunning, mayAnswer }) {
    setText(this.name, this.call.name);
    if (!this.isWhole) setText(this.arguments, this.call.arguments);
    if (!isRunning && !this.isWhole) {
      this.isWhole = true;
      const block = jsonBlock(this.call.arguments);
      this.arguments.replaceWith(block);
    }
    this.result.readOnly = !mayAnswer;
    this.result.placeholder = mayAnswer ? "what the tool returns, JSON or text" : "";
  }
}
