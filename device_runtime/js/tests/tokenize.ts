/** The tokens of texts, for comparison with Python's: `{"files", "texts"}` on standard input, for each file the ids of each
 * text on output.
 */

import { readFileSync } from "node:fs";
import { Work } from "../src/core/texts/characters.ts";
import { Tokenizer } from "../src/core/texts/tokenizer.ts";

const { files, texts } = JSON.parse(readFileSync(0, "utf8"));
const ids = files.map((file: unknown) => {
  const tokenizer = new Tokenizer(file);
  return texts.map((text: string) => {
    const { before, own, after } = tokenizer.encode(text, new Work());
    return [...before, ...own, ...after];
  });
});
process.stdout.write(JSON.stringify(ids));
