// The Vercel AI SDK: node vercel.mjs BASE_URL (chat|responses|compatible) (whole|stream)

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { DESCRIPTIONS, PARAMETERS, QUESTIONS, TOOLS } from "./tools.mjs";

const [baseURL, surface, way] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "strop", baseURL, apiKey: "none" });
const model = {
  chat: () => openai.chat("agent"),
  responses: () => openai("agent"),
  compatible: () => compatible("agent"),
}[surface]();

const tools = {};
for (const [name, execute] of Object.entries(TOOLS)) {
  const inputSchema = jsonSchema(PARAMETERS[name]);
  tools[name] = tool({ description: DESCRIPTIONS[name], inputSchema, execute });
}

const messages = [];
for (const question of QUESTIONS) {
  messages.push({ role: "user", content: question });
  const options = { model, messages, tools, stopWhen: stepCountIs(5), maxRetries: 0 };
  if (way === "stream") {
    const result = streamText({
      ...options,
      onError: ({ error }) => {
        throw error;
      },
    });
    for await (const _ of result.textStream);
    messages.push(...(await result.response).messages);
  } else {
    const result = await generateText(options);
    messages.push(...result.response.messages);
  }
}
