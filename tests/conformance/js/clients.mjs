// JavaScript agents against a running server: three turns with a tool, with the history that each agent keeps.
//
//     node clients.mjs URL
//
// A check fails if a request is refused, or if the tool was not called.

import { Agent, OpenAIChatCompletionsModel, Runner, setTracingDisabled, tool as agentTool } from "@openai/agents";
import { createOpenAI } from "@ai-sdk/openai";
import { complete } from "@mariozechner/pi-ai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [url] = process.argv.slice(2);
const base = `${url}/v1`;
const MODEL = "embedded";
const QUESTIONS = ["What is the weather in Rome?", "And why?", "What is a KV cache?"];
const DESCRIPTION = "The weather of a city.";
const CITY = z.object({ city: z.string() });
globalThis.AI_SDK_LOG_WARNINGS = false;

function expect(holds, what) {
  if (!holds) throw new Error(what);
}

// Its default provider speaks the Responses API, and refers to stored items from the second turn on.
async function aiSdk() {
  const model = createOpenAI({ baseURL: base, apiKey: "none" })(MODEL);
  const execute = async () => "sunny";
  const messages = [];
  for (const [turn, question] of QUESTIONS.entries()) {
    messages.push({ role: "user", content: question });
    const asked = {
      model, messages, maxOutputTokens: 300, maxRetries: 0,
      stopWhen: stepCountIs(turn ? 3 : 1),
      toolChoice: turn ? "auto" : "required",
      tools: { get_weather: tool({ description: DESCRIPTION, inputSchema: CITY, execute }) },
      providerOptions: { openai: { reasoningEffort: "low", reasoningSummary: "detailed", forceReasoning: true } },
    };
    if (!turn) {
      messages.push(...(await generateText(asked)).response.messages);
      continue;
    }
    const streamed = streamText({ ...asked, onError: () => {} });
    for await (const part of streamed.fullStream) if (part.type === "error") throw part.error;
    messages.push(...(await streamed.response).messages);
  }
  expect(JSON.stringify(messages).includes('"tool-call"'), "no tool was called");
  expect(JSON.stringify(messages).includes('"itemId"'), "no item has an id that could be referred to");
}

async function openaiAgents() {
  setTracingDisabled(true);
  const model = new OpenAIChatCompletionsModel(new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 }), MODEL);
  const weather = agentTool({ name: "get_weather", description: DESCRIPTION, parameters: CITY, execute: async () => "sunny" });
  const agent = new Agent({ name: "agent", model, tools: [weather], modelSettings: { temperature: 0, maxTokens: 300 } });
  let history = [];
  for (const question of QUESTIONS) {
    history = (await new Runner().run(agent, [...history, { role: "user", content: question }], { maxTurns: 5 })).history;
  }
  expect(history.some(item => item.type === "function_call"), "no tool was called");
}

// It keeps encrypted reasoning, and stores nothing on the server.
async function piResponses() {
  const model = {
    id: MODEL, name: MODEL, api: "openai-responses", provider: "openai", baseUrl: base, reasoning: true, input: ["text"],
    cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 }, contextWindow: 4096, maxTokens: 300,
  };
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const context = { systemPrompt: "Be brief.", messages: [], tools: [{ name: "get_weather", description: DESCRIPTION, parameters }] };
  for (const question of QUESTIONS) {
    context.messages.push({ role: "user", content: question, timestamp: Date.now() });
    for (let step = 0; step < 3; step++) {
      const options = { apiKey: "none", reasoningEffort: "medium", reasoningSummary: "auto", maxTokens: 300 };
      const answer = await complete(model, context, options);
      expect(answer.stopReason !== "error", answer.errorMessage);
      context.messages.push(answer);
      const calls = answer.content.filter(part => part.type === "toolCall");
      for (const { id, name } of calls) {
        const content = [{ type: "text", text: "sunny" }];
        context.messages.push({ role: "toolResult", toolCallId: id, toolName: name, content, isError: false, timestamp: Date.now() });
      }
      if (!calls.length) break;
    }
  }
  expect(JSON.stringify(context.messages).includes("encrypted_content"), "no reasoning was sealed");
}

let failed = false;
for (const check of [aiSdk, openaiAgents, piResponses]) {
  try {
    await check();
    console.log(`ok    javascript ${check.name}`);
  } catch (error) {
    failed = true;
    console.log(`FAIL  javascript ${check.name}: ${error?.message} ${error?.responseBody ?? ""}`);
  }
}
process.exit(failed ? 1 : 0);
