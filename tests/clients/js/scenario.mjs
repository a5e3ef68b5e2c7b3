// One scenario against an endpoint, chosen by the first argument; its outcome is one line of JSON.
// MESHNET_BASE_URL and MESHNET_API_KEY say where and as whom.
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.MESHNET_BASE_URL,
  apiKey: process.env.MESHNET_API_KEY,
  maxRetries: 0,
  timeout: 60_000,
});
const model = "smollm2";
const ask = { model, temperature: 0, max_tokens: 16, messages: [{ role: "user", content: "Say hello." }] };
const story = [{ role: "user", content: "Write a very long story about a fox who learns to sail." }];

const scenarios = {
  async models() {
    const listed = [];
    for await (const one of client.models.list()) listed.push(one.id);
    return { listed, retrieved: (await client.models.retrieve(listed[0])).id };
  },

  async answer() {
    const { data, response } = await client.chat.completions.create(ask).withResponse();
    return {
      text: data.choices[0].message.content,
      reason: data.choices[0].finish_reason,
      usage: data.usage,
      requestId: data._request_id,
      call: response.headers.get("x-meshnet-call"),
    };
  },

  async stream() {
    const chunks = [];
    const stream = await client.chat.completions.create({
      ...ask,
      stream: true,
      stream_options: { include_usage: true },
    });
    for await (const chunk of stream) chunks.push(chunk);
    return {
      role: chunks[0].choices[0].delta.role,
      text: chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""),
      reasons: chunks.map((chunk) => chunk.choices[0]?.finish_reason).filter(Boolean),
      usage: chunks.at(-1).usage,
      last: chunks.at(-1).choices,
    };
  },

  async helper() {
    const runner = client.chat.completions.stream(ask);
    let deltas = "";
    runner.on("content", (delta) => (deltas += delta));
    const final = await runner.finalChatCompletion();
    return { deltas, text: final.choices[0].message.content };
  },

  async completion() {
    let text = "";
    const asked = { model, temperature: 0, max_tokens: 8, prompt: "Once upon a time" };
    for await (const chunk of await client.completions.create({ ...asked, stream: true })) {
      text += chunk.choices[0].text;
    }
    return { streamed: text, whole: (await client.completions.create(asked)).choices[0].text };
  },

  async abort() {
    const controller = new AbortController();
    const { data, response } = await client.chat.completions
      .create({ model, messages: story, temperature: 0, max_tokens: 1000, stream: true }, { signal: controller.signal })
      .withResponse();
    let seen = 0;
    for await (const chunk of data) {
      if (chunk.choices[0].delta.content && ++seen === 4) controller.abort();
    }
    return { seen, call: response.headers.get("x-meshnet-call") };
  },

  async abortWaiting() {
    const controller = new AbortController();
    setTimeout(() => controller.abort(), 1500);
    try {
      await client.chat.completions.create(
        { model, messages: story, temperature: 0, max_tokens: 1000 },
        { signal: controller.signal },
      );
    } catch (error) {
      return { error: error.constructor.name };
    }
    return { error: "" };
  },

  async errors() {
    const outcomes = {};
    const attempts = {
      bad: () => client.chat.completions.create({ ...ask, temperature: 3 }),
      unknown: () => client.chat.completions.create({ ...ask, foo: 1 }),
      missing: () => client.chat.completions.create({ ...ask, model: "gpt-4o" }),
      key: () => client.withOptions({ apiKey: "mn-wrong" }).models.retrieve(model),
    };
    for (const [name, attempt] of Object.entries(attempts)) {
      try {
        await attempt();
      } catch (error) {
        outcomes[name] = [error.constructor.name, error.status, error.code, error.param];
      }
    }
    return outcomes;
  },

  async retries() {
    // Every try is counted; the answer comes once the mesh is whole.
    let tries = 0;
    const patient = client.withOptions({
      maxRetries: 20,
      fetch: (url, init) => {
        tries += 1;
        return fetch(url, init);
      },
    });
    const answer = await patient.chat.completions.create(ask);
    return { tries, text: answer.choices[0].message.content };
  },
};

console.log(JSON.stringify(await scenarios[process.argv[2]]()));
