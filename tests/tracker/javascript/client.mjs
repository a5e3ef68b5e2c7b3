// The OpenAI SDK for JavaScript against a tracker: models, one answer, a stream, an abort, an error.
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 2 });
const messages = [{ role: "user", content: "Hi" }];
const result = {};

result.models = (await client.models.list()).data.map((model) => model.id);

const answer = await client.chat.completions.create({ model: "toy", messages });
result.answer = answer.choices[0].message.content;
result.usage = answer.usage.completion_tokens;

let text = "";
const stream = await client.chat.completions.create({
  model: "toy",
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) result.streamUsage = chunk.usage.completion_tokens;
}
result.stream = text;

const controller = new AbortController();
let seen = 0;
try {
  const endless = await client.chat.completions.create(
    { model: "endless", messages, stream: true },
    { signal: controller.signal },
  );
  for await (const chunk of endless) {
    if (chunk.choices[0]?.delta?.content && ++seen === 3) controller.abort();
  }
} catch (error) {
  if (error.name !== "APIUserAbortError" && error.name !== "AbortError") throw error;
}
result.aborted = seen;

try {
  await client.chat.completions.create({ model: "nothing", messages });
} catch (error) {
  result.error = [error.status, error.code];
}

console.log(JSON.stringify(result));
