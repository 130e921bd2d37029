// The page's modules that need no document. `node --test` runs it, from test_page.py.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";
import { SourceTextModule } from "node:vm";

import { newAnswer, summary, take, toRequest } from "../../jaxpage/server/page/conversation.js";
import { isJson, reindent } from "../../jaxpage/server/page/json.js";
import { chunks } from "../../jaxpage/server/page/sse.js";
import { level } from "../../jaxpage/server/page/tokens.js";

const PAGE = new URL("../../jaxpage/server/page/", import.meta.url);

for (const name of readdirSync(PAGE).filter((file) => file.endsWith(".js"))) {
  test(`${name} is well-formed`, () => {
    new SourceTextModule(readFileSync(new URL(name, PAGE), "utf8"), { identifier: name });
  });
}

function streamOf(text, size = Infinity) {
  const bytes = new TextEncoder().encode(text);
  return new ReadableStream({
    start(controller) {
      for (let i = 0; i < bytes.length; i += size) controller.enqueue(bytes.slice(i, i + size));
      controller.close();
    },
  });
}

async function all(stream) {
  const found = [];
  for await (const chunk of chunks(stream)) found.push(chunk);
  return found;
}

test("a stream may be cut anywhere", async () => {
  const text = ': note\r\n\r\ndata: {"a": "é😀"}\n\ndata:{"b":\ndata: 2}\r\n\r\n'
    + 'event: x\ndata: {"c": 3}\r\rdata: [DONE]\n\ndata: {"d": 4}\n\n';
  for (let size = 1; size <= text.length + 4; size += 1) {
    assert.deepEqual(await all(streamOf(text, size)), [{ a: "é😀" }, { b: 2 }, { c: 3 }], `pieces of ${size}`);
  }
});

test("a stream that ends without [DONE] has broken off", async () => {
  await assert.rejects(all(streamOf('data: {"a": 1}\n\n')), /broke off: the server closed/);
  await assert.rejects(all(streamOf("")), /broke off/);
});

test("a connection that is lost is told", async () => {
  const stream = new ReadableStream({ pull: (controller) => controller.error(new TypeError("network error")) });
  await assert.rejects(all(stream), /the connection was lost/);
});

test("an error within a stream ends it, with the server's words", async () => {
  const text = 'data: {"error": {"message": "no memory", "param": "n", "code": 500}}\n\n';
  await assert.rejects(all(streamOf(text)), { message: "no memory", param: "n", status: 500 });
});

test("JSON is indented without a change to its values", () => {
  const show = (text) => reindent(text).map(([, part]) => part).join("");
  const text = '{"a":12345678901234567890,"a":[1.0,{}, []],"q\\"{,":"x: [y]"}';
  const shown = '{\n  "a": 12345678901234567890,\n  "a": [\n    1.0,\n    {},\n    []\n  ],\n  "q\\"{,": "x: [y]"\n}';
  assert.equal(show(text), shown);
  assert.equal(show(shown), shown);
  const kinds = reindent('{"a": ["b", null]}').filter(([kind]) => kind);
  assert.deepEqual(kinds, [["name", '"a"'], ["string", '"b"'], ["value", "null"]]);
});

test("JSON is an object or an array", () => {
  const texts = ["{}", " [1]", "3", "{", "text {}", ""];
  assert.deepEqual(texts.map(isJson), [true, true, false, false, false, false]);
});

const answer = (content, more = {}) => ({ ...newAnswer(), content, isRunning: false, ...more });
const user = (content) => ({ role: "user", content });

test("what was not answered is left out, unless it is the last", () => {
  const messages = [user("one"), answer("1"), user("lost"), answer("", { error: "down" }), user("two"), answer("2"), user("three")];
  const sent = (list) => toRequest(list, "be brief").map((m) => `${m.role}: ${m.content}`);
  assert.deepEqual(sent(messages), [
    "system: be brief", "user: one", "assistant: 1", "user: two", "assistant: 2", "user: three",
  ]);
  assert.deepEqual(sent([user("lost"), answer("", { isRunning: true })]), ["system: be brief", "user: lost"]);
});

test("pictures go before the text of their message", () => {
  const picture = { type: "image_url", image_url: { url: "data:image/png;base64,AA" } };
  const asked = { ...user("what?"), pictures: [picture.image_url.url] };
  assert.deepEqual(toRequest([asked], "")[0].content, [picture, { type: "text", text: "what?" }]);
  assert.deepEqual(toRequest([{ ...asked, content: " " }], "")[0].content, [picture]);
  assert.equal(toRequest([{ ...asked, pictures: [] }], "")[0].content, "what?");
});

test("calls of tools come in pieces, and go back with their results", () => {
  const called = answer("I look.");
  const delta = (toolCall) => take(called, { id: "x", choices: [{ index: 0, delta: { tool_calls: [toolCall] } }] });
  delta({ index: 0, id: "c1", function: { name: "f", arguments: '{"a"' } });
  delta({ index: 1, id: "c2", function: { name: "g", arguments: "{}" } });
  delta({ index: 0, function: { arguments: ": 1}" } });
  assert.deepEqual(toRequest([user("q"), called], "").at(-1), { role: "assistant", content: "I look." });
  called.toolCalls[0].result = "42";
  assert.deepEqual(toRequest([user("q"), called], "").slice(1), [
    {
      role: "assistant",
      content: "I look.",
      tool_calls: [{ id: "c1", type: "function", function: { name: "f", arguments: '{"a": 1}' } }],
    },
    { role: "tool", tool_call_id: "c1", name: "f", content: "42" },
  ]);
});

test("an answer takes text, reasoning, tokens and usage", () => {
  const found = newAnswer();
  const token = { token: "a", logprob: -0.5, top_logprobs: [] };
  take(found, { id: "chatcmpl-1", choices: [{ index: 0, delta: { role: "assistant", content: "" } }] });
  assert.equal(found.first, null);
  take(found, { choices: [{ index: 0, delta: { reasoning: "hm" } }] });
  take(found, { choices: [{ index: 0, delta: { content: "a" }, logprobs: { content: [token] } }] });
  take(found, { choices: [{ index: 0, delta: {}, finish_reason: "stop", stop_reason: "END" }] });
  take(found, { choices: [], usage: { prompt_tokens: 9, completion_tokens: 1, prompt_tokens_details: { cached_tokens: 8 } } });
  assert.deepEqual([found.id, found.content, found.reasoning, found.tokens], ["chatcmpl-1", "a", "hm", [token]]);
  found.isRunning = false;
  assert.match(summary(found), /^1 token · first after \d+ ms · 8 of 9 prompt tokens cached · stopped at "END"$/);
});

test("tokens have five levels of probability", () => {
  assert.deepEqual([1, 0.9, 0.89, 0.5, 0.2, 0.01, 0].map((p) => level(Math.log(p))), [0, 0, 1, 2, 3, 4, 4]);
});
