// The tools and the questions of every client here: see tests/clients/conftest.py.

export const QUESTIONS = ["What colour is the fence?", "And the door?"];

export const TOOLS = {
  look_up: ({ thing }) => `${thing} is navy`,
  count: ({ colour, times }) => String(times * colour.length),
};

export const DESCRIPTIONS = {
  look_up: "Look up the colour of a thing.",
  count: "Count things of a colour.",
};

export const PARAMETERS = {
  look_up: {
    type: "object",
    properties: { thing: { type: "string" } },
    required: ["thing"],
    additionalProperties: false,
  },
  count: {
    type: "object",
    properties: { colour: { type: "string" }, times: { type: "integer" } },
    required: ["colour", "times"],
    additionalProperties: false,
  },
};
