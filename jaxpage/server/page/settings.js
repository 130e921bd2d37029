// The settings as fields of a request.

import { byId } from "./dom.js";

const SCHEMA_EXAMPLE = {
  type: "object",
  properties: {
    name: { type: "string" },
    age: { type: "integer" },
    tags: { type: "array", items: { type: "string" }, maxItems: 3 },
  },
  required: ["name", "age", "tags"],
  additionalProperties: false,
};
const TOOLS_EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city, now",
    parameters: {
      type: "object",
      properties: { city: { type: "string" } },
      required: ["city"],
    },
  },
}];
const CONSTRAINTS = {
  json_schema: { label: "Schema", example: JSON.stringify(SCHEMA_EXAMPLE, null, 2) },
  regex: { label: "Regular expression", example: "(yes|no), because [a-z ,]{10,80}\\." },
  choice: { label: "Texts, one a line", example: "positive\nneutral\nnegative" },
};

export class Settings {
  constructor() {
    this.form = byId("settings-form");
    this.constraints = {}; // what was typed, by format
    byId("format").addEventListener("change", () => this.#showConstraint());
    byId("constraint").addEventListener("input", () => this.#keepConstraint());
    byId("constraint-example").addEventListener("click", () => {
      byId("constraint").value = CONSTRAINTS[this.format].example;
      this.#keepConstraint();
    });
    byId("tools").addEventListener("input", () => this.#checkTools());
    byId("tools-example").addEventListener("click", () => {
      byId("tools").value = JSON.stringify(TOOLS_EXAMPLE, null, 2);
      this.#checkTools();
    });
    byId("logprobs").addEventListener("change", () => this.#showLogprobs());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("reset", () => {
      this.constraints = {};
      // The fields are reset after this event.
      setTimeout(() => this.#showAll());
    });
    this.#showAll(); // a browser may have restored fields
  }

  get format() {
    return byId("format").value;
  }

  get system() {
    return byId("system").value.trim();
  }

  /** Whether all fields are well-formed; the first that is not says so to the user, and has the focus. */
  check() {
    const field = this.form.querySelector(":invalid:not(fieldset)");
    if (!field) return true;
    const details = field.closest("details");
    if (details) details.open = true;
    this.form.reportValidity();
    return false;
  }

  /** Fields of a chat request, besides model and messages. Call it only if `check` is content. */
  toRequest() {
    const fields = {};
    for (const input of this.form.querySelectorAll("input[type=number][name]")) {
      if (input.value !== "") fields[input.name] = Number(input.value);
    }
    const stop = lines(byId("stop").value).map(unescape);
    if (stop.length) fields.stop = stop;
    if (byId("logprobs").checked) {
      fields.logprobs = true;
      fields.top_logprobs = Number(byId("top-logprobs").value);
    }
    return { ...fields, ...this.#constraint(), ...this.#tools() };
  }

  #constraint() {
    const text = byId("constraint").value;
    switch (this.format) {
      case "json_object": return { response_format: { type: "json_object" } };
      case "json_schema":
        return { response_format: { type: "json_schema", json_schema: { name: "output", schema: JSON.parse(text) } } };
      case "regex": return { structured_outputs: { regex: text } };
      case "choice": return { structured_outputs: { choice: lines(text) } };
      default: return {};
    }
  }

  #tools() {
    const tools = this.#parsedTools();
    if (!tools?.length) return {};
    const choice = byId("tool-choice").value;
    const named = choice.startsWith("function ") ? choice.slice("function ".length) : null;
    return { tools, tool_choice: named === null ? choice : { type: "function", function: { name: named } } };
  }

  #showAll() {
    this.#showConstraint();
    this.#showLogprobs();
    this.#checkTools();
  }

  #showLogprobs() {
    byId("top-logprobs").disabled = !byId("logprobs").checked;
  }

  #showConstraint() {
    const constraint = CONSTRAINTS[this.format];
    const field = byId("constraint");
    byId("constraint-field").hidden = constraint === undefined;
    field.required = constraint !== undefined;
    field.value = this.constraints[this.format] ?? "";
    if (constraint) document.querySelector("label[for=constraint]").textContent = constraint.label;
    this.#checkConstraint();
  }

  #keepConstraint() {
    this.constraints[this.format] = byId("constraint").value;
    this.#checkConstraint();
  }

  #checkConstraint() {
    const field = byId("constraint");
    const isSchema = this.format === "json_schema" && field.value.trim() !== "";
    field.setCustomValidity(isSchema ? jsonFault(field.value) : "");
  }

  #parsedTools() {
    const text = byId("tools").value.trim();
    return text === "" ? null : JSON.parse(text);
  }

  #checkTools() {
    const field = byId("tools");
    field.setCustomValidity(field.value.trim() === "" ? "" : toolsFault(field.value));
    const choice = byId("tool-choice");
    const tools = field.validity.valid ? this.#parsedTools() ?? [] : [];
    choice.disabled = tools.length === 0;
    const chosen = choice.value;
    for (const option of choice.querySelectorAll("option[value^='function ']")) option.remove();
    for (const tool of tools) {
      const name = tool.function.name;
      choice.append(new Option(`must call ${name}`, `function ${name}`));
    }
    choice.value = [...choice.options].some((option) => option.value === chosen) ? chosen : "auto";
  }
}

function jsonFault(text) {
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return `This is no JSON: ${error.message}`;
  }
}

function toolsFault(text) {
  const fault = jsonFault(text);
  if (fault) return fault;
  const tools = JSON.parse(text);
  const isNamed = (tool) => tool?.type === "function" && typeof tool.function?.name === "string";
  if (Array.isArray(tools) && tools.every(isNamed)) return "";
  return 'Tools are an array of {"type": "function", "function": {"name": …}}.';
}

const lines = (text) => text.split("\n").filter((line) => line !== "");

/** `\n`, `\t` and `\\` as in most languages. */
function unescape(text) {
  return text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}
