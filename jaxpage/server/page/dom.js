// Elements made in code. Text is always text: nothing here, or anywhere on the page, is parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** An element with properties (`class` and `aria-…`, `data-…` included) and children: elements, or strings as text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "class") element.className = value;
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export function button(text, onclick, properties = {}) {
  return make("button", { type: "button", onclick, ...properties }, text);
}

/** Set a property only where that changes something: an unchanged live region stays silent, a selection stays. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Have a screen reader say something, once. */
export function announce(text) {
  const announcer = byId("announcer");
  announcer.textContent = "";
  // A change that comes with the emptying would be none.
  setTimeout(() => { announcer.textContent = text; }, 50);
}
