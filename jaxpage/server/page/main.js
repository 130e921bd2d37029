// Puts the page together: views, the model, the key.

import { call, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { EngineView } from "./engine.js";
import { Settings } from "./settings.js";

const settings = new Settings();
const dialog = byId("key-dialog");
let isRefused = false; // the key dialog was closed without a key: it opens on request only
let isGiven = false; // there was one

const chat = new Chat({
  settings,
  model: () => (byId("model").disabled ? "" : byId("model").value),
  checkSettings() {
    if (settings.form.matches(":invalid")) show("settings");
    return settings.check();
  },
  askForKey,
});
const engine = new EngineView({ ownIds: () => chat.ownIds, askForKey });

/** On a narrow screen one of the three sections is visible; on a wide one all are. */
function show(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll(".views button")) {
    if (button.dataset.view === view) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
  if (view === "engine") engine.poll();
}

for (const button of document.querySelectorAll(".views button")) {
  button.addEventListener("click", () => show(button.dataset.view));
}

async function loadModels() {
  const select = byId("model");
  byId("notice").hidden = true;
  try {
    const { data } = await (await call("v1/models")).json();
    select.replaceChildren(...data.map(({ id }) => new Option(id, id)));
    select.disabled = data.length === 0;
  } catch (error) {
    select.replaceChildren(new Option("none"));
    select.disabled = true;
    if (error.status === 401) askForKey();
    else notify(error.message);
  }
  chat.modelChanged();
}

function notify(text) {
  setText(byId("notice").firstElementChild, text);
  byId("notice").hidden = false;
}

function askForKey() {
  byId("key-button").hidden = false;
  if (dialog.open || isRefused) return;
  setText(byId("key-text"), isGiven ? "The server did not accept that key." : "This server answers only who has its key.");
  dialog.showModal();
}

byId("notice").querySelector("button").addEventListener("click", start);
byId("key-button").addEventListener("click", () => dialog.showModal());
byId("key-cancel").addEventListener("click", () => {
  isRefused = true;
  dialog.close();
});
dialog.addEventListener("cancel", () => { isRefused = true; }); // by Escape
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value, byId("key-keep").checked);
  byId("key").value = "";
  isGiven = true;
  isRefused = false;
  dialog.close();
  start();
});

function start() {
  loadModels();
  engine.start();
}

start();
