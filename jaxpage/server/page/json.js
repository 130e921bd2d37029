// JSON for reading: indented, with names, strings and the rest told apart.

import { make } from "./dom.js";

const LEXEME = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g;

/** Whether a text is a JSON object or array. */
export function isJson(text) {
  if (!/^\s*[{[]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/**
 * The lexemes of a JSON text with line breaks and indentation between them: [kind, text] with kind "name", "string",
 * "value" or "". Numbers and names that come twice stay as they were written, which parsing would not leave them.
 */
export function reindent(text) {
  const parts = [];
  const lexemes = text.match(LEXEME) ?? [];
  let depth = 0;
  const breakLine = () => parts.push(["", `\n${"  ".repeat(depth)}`]);
  lexemes.forEach((lexeme, i) => {
    const next = lexemes[i + 1];
    const closes = lexeme === "}" || lexeme === "]";
    if (closes) {
      depth -= 1;
      if (!"{[".includes(lexemes[i - 1])) breakLine();
    }
    parts.push([kindOf(lexeme, next), lexeme]);
    if (lexeme === "{" || lexeme === "[") {
      depth += 1;
      if (next !== "}" && next !== "]") breakLine();
    } else if (lexeme === ",") breakLine();
    else if (lexeme === ":") parts.push(["", " "]);
  });
  return parts;
}

function kindOf(lexeme, next) {
  if (lexeme[0] === '"') return next === ":" ? "name" : "string";
  return "{}[],:".includes(lexeme) ? "" : "value";
}

/** A `pre` of a JSON text; of text that is none, as it is. */
export function jsonBlock(text) {
  const block = make("pre", { class: "json", tabIndex: 0 });
  const parts = isJson(text) ? reindent(text) : [["", text]];
  for (const [kind, part] of parts) block.append(kind ? make("span", { class: kind }, part) : part);
  return block;
}
