// Messages as data: what a stream adds to an answer, and what of a conversation goes to the model.

/** @typedef {{role: "user", content: string, pictures?: string[]}} UserMessage  pictures: data URLs */

/** An answer before its first token. Times are milliseconds. */
export function newAnswer() {
  return {
    role: "assistant",
    id: null, // of the request
    content: "",
    reasoning: "",
    toolCalls: [], // {id, name, arguments, result}: result is what the user typed
    tokens: [], // {token, logprob, top_logprobs}
    finishReason: null,
    stopReason: null,
    usage: null,
    error: null,
    isRunning: true,
    isStopped: false, // by the user
    started: performance.now(),
    first: null,
    ended: null,
  };
}

/** Take a chunk of a stream into an answer. */
export function take(answer, chunk) {
  answer.id ??= chunk.id ?? null;
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.find((c) => (c.index ?? 0) === 0);
  if (!choice) return;
  const delta = choice.delta ?? {};
  if (delta.content) answer.content += delta.content;
  if (delta.reasoning) answer.reasoning += delta.reasoning;
  for (const call of delta.tool_calls ?? []) takeCall(answer, call);
  if (choice.logprobs?.content) answer.tokens.push(...choice.logprobs.content);
  if (delta.content || delta.reasoning || delta.tool_calls?.length || choice.logprobs?.content?.length) {
    answer.first ??= performance.now();
  }
  if (choice.finish_reason) {
    answer.finishReason = choice.finish_reason;
    answer.stopReason = choice.stop_reason ?? null;
  }
}

function takeCall(answer, delta) {
  const index = delta.index ?? answer.toolCalls.length;
  const call = (answer.toolCalls[index] ??= { id: "", name: "", arguments: "", result: "" });
  if (delta.id) call.id = delta.id;
  if (delta.function?.name) call.name = delta.function.name;
  if (delta.function?.arguments) call.arguments += delta.function.arguments;
}

export const isEmpty = (answer) => !answer.content && !answer.reasoning && !answer.toolCalls.length;

/**
 * The messages for the model, an answer yet to come at the end left out. A question that was never answered is left out
 * with its failure, unless it is the last: many templates refuse two questions in a row.
 */
export function toRequest(messages, system) {
  const sent = system ? [{ role: "system", content: system }] : [];
  messages.forEach((message, i) => {
    if (isLeftOut(messages, i)) return;
    if (message.role === "user") sent.push(userMessage(message));
    else sent.push(...answerMessages(message));
  });
  return sent;
}

/** Pictures stand before the text, as models are trained. */
function userMessage({ content, pictures = [] }) {
  if (pictures.length === 0) return { role: "user", content };
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  if (content.trim()) parts.push({ type: "text", text: content });
  return { role: "user", content: parts };
}

/** Whether a message is no part of what the model is told. */
export function isLeftOut(messages, i) {
  const message = messages[i], next = messages[i + 1];
  if (message.role === "assistant") return isEmpty(message);
  const isUnanswered = next?.role === "assistant" && isEmpty(next) && !next.isRunning;
  return isUnanswered && i + 2 < messages.length;
}

function answerMessages(answer) {
  // A call without a result is one that the conversation went past.
  const calls = answer.toolCalls.filter((call) => call.result !== "");
  const message = { role: "assistant", content: answer.content };
  if (!calls.length) return [message];
  message.tool_calls = calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  const results = calls.map((call) => ({
    role: "tool", tool_call_id: call.id, name: call.name, content: call.result,
  }));
  return [message, ...results];
}

/** What is known of an answer in numbers, as one line. */
export function summary(answer) {
  const parts = [];
  const count = answer.usage?.completion_tokens ?? (answer.tokens.length || null);
  if (count !== null) parts.push(`${count} token${count === 1 ? "" : "s"}`);
  if (answer.first !== null) parts.push(`first after ${seconds(answer.first - answer.started)}`);
  const took = (answer.ended ?? performance.now()) - answer.first;
  if (answer.first !== null && count > 1 && took > 0) {
    parts.push(`${((count - 1) / took * 1000).toPrecision(3)} tokens/s`);
  }
  const cached = answer.usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${answer.usage.prompt_tokens} prompt tokens cached`);
  if (!answer.isRunning) parts.push(ending(answer));
  return parts.filter(Boolean).join(" · ");
}

function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
}

function ending(answer) {
  if (answer.isStopped) return "stopped by you";
  switch (answer.finishReason) {
    case "stop": return answer.stopReason === null ? "complete" : `stopped at ${JSON.stringify(answer.stopReason)}`;
    case "length": return "cut off at the limit of tokens";
    case "tool_calls": return "ended with calls of tools";
    case null: return "";
    default: return answer.finishReason;
  }
}
