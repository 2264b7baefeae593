/** The tokens of texts, for comparison with Python's: `{"file", "texts"}` on standard input, their ids on output. */

import { readFileSync } from "node:fs";
import { Tokenizer } from "../src/core/tokenizer.ts";

const { file, texts } = JSON.parse(readFileSync(0, "utf8"));
const tokenizer = new Tokenizer(file);
const ids = texts.map((text: string) => {
  const { before, own, after } = tokenizer.encode(text);
  return [...before, ...own, ...after];
});
process.stdout.write(JSON.stringify(ids));
