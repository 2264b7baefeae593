/** Codecs: linear maps between a report as a graph makes it and as it travels. Spec: docs/spec/plan.md §5.1.
 *
 * A device only encodes. The float32 operations are those of the specification, in its order: so the bits are Python's.
 */

import * as v from "valibot";
import { utf8 } from "./bytes.ts";
import { FormatError } from "./errors.ts";
import { count } from "./json.ts";
import { stream } from "./streams.ts";

const rotationSchema = v.object({ codec: v.literal("rotation"), block: count });
const subsampleSchema = v.object({ codec: v.literal("subsample"), kept: count });
export const codecSchema = v.variant("codec", [rotationSchema, subsampleSchema]);

export type Codec = v.InferOutput<typeof codecSchema>;
type Rotation = v.InferOutput<typeof rotationSchema>;
type Subsample = v.InferOutput<typeof subsampleSchema>;
const LABEL = utf8("muster.codec.v1");
type Float32 = Float32Array<ArrayBuffer>;

/** The public key of a round's codecs, the same for all its devices. */
export interface RoundKey {
  readonly seed: bigint;
  readonly round: number;
}

/** The number of values that travel of `size`. Throws FormatError when a codec does not fit. */
export function codedSize(codecs: readonly Codec[], size: number): number {
  return codecs.reduce(codedSizeOf, size);
}

/** The values that travel. segment: the index of the values' segment in its layout. */
export async function encode(
  codecs: readonly Codec[],
  values: Float32,
  key: RoundKey,
  segment: number,
): Promise<Float32> {
  let coded = values;
  for (const [place, codec] of codecs.entries()) {
    const numbers = [key.seed, BigInt(key.round), BigInt(segment), BigInt(place)];
    coded = codec.codec === "rotation" ? await rotate(codec, coded, numbers) : await subsample(codec, coded, numbers);
  }
  return coded;
}

function codedSizeOf(size: number, codec: Codec): number {
  if (codec.codec === "subsample") {
    if (codec.kept < Math.min(1, size) || codec.kept > size) {
      throw new FormatError(`a subsample of ${codec.kept} values; a segment of ${size} has at most as many`);
    }
    return codec.kept;
  }
  const { block } = codec;
  if (!Number.isInteger(Math.log2(block)) || block > Math.max(size, 1)) {
    throw new FormatError(`a rotation in blocks of ${block}; ${size} values need a power of two up to ${size}`);
  }
  return size;
}

/** Rotate every block; the last one ends where the values end. */
async function rotate({ block }: Rotation, values: Float32, key: readonly bigint[]): Promise<Float32> {
  const rotated = values.slice();
  const blocks = Math.ceil(values.length / block);
  const words = await stream(LABEL, key, Math.ceil((blocks * block) / 64));
  for (let place = 0; place < blocks; place++) {
    const part = rotated.subarray(Math.min(place * block, values.length - block)).subarray(0, block);
    for (let index = 0; index < block; index++) {
      const bit = place * block + index;
      part[index]! *= (words[bit >> 6]! >> BigInt(bit & 63)) & 1n ? -1 : 1;
    }
    transform(part);
  }
  return rotated;
}

/** One value of each of `kept` strata of neighbours. */
async function subsample({ kept }: Subsample, values: Float32, key: readonly bigint[]): Promise<Float32> {
  const words = await stream(LABEL, key, kept);
  const [width, longer] = [Math.floor(values.length / kept), values.length % kept];
  return new Float32Array(kept).map((_, stratum) => {
    const within = Number(words[stratum]! % BigInt(width + Number(stratum < longer)));
    return values[stratum * width + Math.min(stratum, longer) + within]!;
  });
}

/** The Walsh–Hadamard transform of a block in place, divided by the root of its length: its own inverse. */
function transform(block: Float32): void {
  for (let half = 1; half < block.length; half *= 2) {
    for (let begin = 0; begin < block.length; begin += 2 * half) {
      for (let left = begin; left < begin + half; left++) {
        const [a, b] = [block[left]!, block[left + half]!];
        block[left] = a + b;
        block[left + half] = a - b;
      }
    }
  }
  const scale = Math.fround(block.length ** -0.5);
  for (let index = 0; index < block.length; index++) {
    block[index]! *= scale;
  }
}
