// OpenAI's own client: node openai.mjs BASE_URL (chat|responses) (whole|stream)

import OpenAI from "openai";
import { DESCRIPTIONS, PARAMETERS, QUESTIONS, TOOLS } from "./tools.mjs";

const [baseURL, surface, way] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const names = Object.keys(TOOLS);
const describe = (name) => ({
  name,
  description: DESCRIPTIONS[name],
  parameters: PARAMETERS[name],
});

async function chat() {
  const tools = names.map((name) => ({
    type: "function",
    function: { ...describe(name), function: TOOLS[name], parse: JSON.parse },
  }));
  let messages = [];
  for (const question of QUESTIONS) {
    messages.push({ role: "user", content: question });
    const stream = way === "stream";
    // The helper that OpenAI's README shows: it calls the tools and goes on until there is an answer.
    const runner = client.chat.completions.runTools({ model: "agent", messages, tools, stream });
    if (stream) for await (const _ of runner);
    await runner.done();
    messages = [...runner.messages];
  }
}

async function responses() {
  const tools = names.map((name) => ({ type: "function", strict: true, ...describe(name) }));
  const history = [];
  for (const question of QUESTIONS) {
    let added = [{ role: "user", content: question }];
    while (added.length) {
      history.push(...added);
      const request = { model: "agent", input: history, tools };
      const response =
        way === "stream"
          ? await client.responses.stream(request).finalResponse()
          : await client.responses.create(request);
      history.push(...response.output);
      added = response.output
        .filter((item) => item.type === "function_call")
        .map((call) => ({
          type: "function_call_output",
          call_id: call.call_id,
          output: TOOLS[call.name](JSON.parse(call.arguments)),
        }));
    }
  }
}

await { chat, responses }[surface]();
