/** The check of an ONNX graph before ONNX Runtime sees its bytes. The rules: docs/spec/plan.md §2.1.
 *
 * A graph is untrusted data, and ONNX Runtime runs far more than a plan needs: endless loops, operators of other
 * domains, tensors in files. So this module walks the protobuf bytes along a table of all fields that a plan's graph
 * may have. No message of the table contains itself, so the table bounds the depth.
 */

import { type Bytes, text } from "../bytes.ts";
import { PlanRefused } from "../errors.ts";
import { PREDICT, stepsGraph } from "./plan.ts";

const OPSET = 18;
/** The operators that a plan may use, all of ONNX's own domain, except the loop. */
const OPERATORS = new Set(
  `Abs Acos Add And Asin Atan Cast Ceil Clip Concat Conv ConvTranspose Cos CumSum Div Equal Erf Exp Expand Floor
  Gather GatherElements Gemm Greater GreaterOrEqual Identity Less LessOrEqual Log LogSoftmax MatMul Max MaxPool Min
  Mod Mul Neg Not Or Pad Pow Range Reciprocal ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape Round
  ScatterElements ScatterND Shape Sigmoid Sign Sin Size Slice Softmax Split Sqrt Squeeze Sub Tanh Tile TopK
  Transpose Unsqueeze Where`.split(/\s+/),
);
/** A loop must end: the last value that it scans is a vector whose bytes are in the graph, or the mask, which the
 * device makes. Its body is a graph of nodes.
 */
const [LOOP, BOUND] = ["Scan", "mask"];
/** How many of its inputs a loop goes over: of more than there are, some engines crash. */
const SCANNED = "num_scan_inputs";
/** A loop scans only the first axis: the plan itself chooses the other axes of a batch. */
const AXES = "scan_input_axes";
const OPERATORS_IN: Readonly<Record<string, ReadonlySet<string>>> = {
  "node.op_type": new Set([...OPERATORS, LOOP]),
  "body's node.op_type": OPERATORS,
};
/** Operators that divide. Of integers, 0 and -1 as divisors may end the process, and an app runs predict graphs in its
 * own.
 */
const DIVIDING = ["Div", "Mod"];
/** By element type, the bytes of an integer. */
const INTEGER_BYTES: Readonly<Record<number, number>> = { 2: 1, 6: 4, 7: 8 };
const FLOATS = [1, 11];
/** Element types by ONNX's numbers: float32, uint8, int32, int64, bool, float64. */
const ELEMENTS = new Set([1, 2, 6, 7, 9, 11]);
const [MOST_NODES, MOST_FIELDS] = [100_000, 3_000_000];

// Wire types of protobuf.
const [VARINT, FIXED64, LENGTH, FIXED32] = [0, 1, 2, 5];
// Kinds of fields: a number, an element type, a text, bytes or a list of numbers; any other is a message of that name.
const PLAIN = ["number", "element", "text", "bytes"];
type Fields = Readonly<Record<number, readonly [field: string, kind: string]>>;
const GRAPH: Fields = {
  1: ["node", "node"],
  2: ["name", "text"],
  5: ["initializer", "tensor"],
  11: ["input", "graph's input"],
  12: ["output", "value"],
  13: ["value_info", "value"],
};
const NODE: Fields = {
  1: ["input", "text"],
  2: ["output", "text"],
  3: ["name", "text"],
  4: ["op_type", "text"],
  5: ["attribute", "attribute"],
  7: ["domain", "text"],
};
const ATTRIBUTE: Fields = {
  1: ["name", "text"],
  2: ["f", "number"],
  3: ["i", "number"],
  4: ["s", "text"],
  7: ["floats", "bytes"],
  8: ["ints", "bytes"],
  20: ["type", "number"],
};
const VALUE: Fields = { 1: ["name", "text"], 2: ["type", "type"] };
const FIELDS: Readonly<Record<string, Fields>> = {
  model: {
    1: ["ir_version", "number"],
    2: ["producer_name", "text"],
    3: ["producer_version", "text"],
    7: ["graph", "graph"],
    8: ["opset_import", "opset"],
  },
  opset: { 1: ["domain", "text"], 2: ["version", "number"] },
  graph: GRAPH,
  node: NODE,
  attribute: { ...ATTRIBUTE, 6: ["g", "body"] },
  body: { 1: ["node", "body's node"], 2: ["name", "text"], 11: ["input", "value"], 12: ["output", "value"] },
  "body's node": { ...NODE, 5: ["attribute", "body's attribute"] },
  "body's attribute": ATTRIBUTE,
  tensor: {
    1: ["dims", "bytes"],
    2: ["data_type", "element"],
    4: ["float_data", "bytes"],
    5: ["int32_data", "bytes"],
    7: ["int64_data", "bytes"],
    8: ["name", "text"],
    9: ["raw_data", "bytes"],
    10: ["double_data", "bytes"],
  },
  "graph's input": VALUE,
  value: VALUE,
  type: { 1: ["tensor_type", "tensor type"] },
  "tensor type": { 1: ["elem_type", "element"], 2: ["shape", "shape"] },
  shape: { 1: ["dim", "dimension"] },
  dimension: { 1: ["dim_value", "number"], 2: ["dim_param", "text"] },
};

/** The fields of messages that give names to values. */
const NAMES: Readonly<Record<string, string>> = {
  node: "output",
  tensor: "name",
  "graph's input": "name",
  value: "name",
};

const ALL_NAMES: Readonly<Record<string, string>> = { ...NAMES, "body's node": "output" };
/** The fields of a tensor that divides: its values are nowhere else than in raw_data. */
const PLAIN_TENSOR = ["dims", "name", "data_type", "raw_data"];

/** Throws PlanRefused, naming the graph `name`, unless its bytes are an ONNX model that a plan may contain. */
export function checkGraph(graph: Bytes, name: string): void {
  try {
    const walk = new Walk(graph, name.endsWith(stepsGraph("")), name === PREDICT);
    walk.message("model", 0, graph.length);
    walk.check();
  } catch (error) {
    throw error instanceof Unfit ? new PlanRefused(`cannot load graph ${name}: ${error.message}`) : error;
  }
}

/** By field of a message: the wire types of its contents, and where these begin and end. */
type Places = Readonly<Record<string, readonly (readonly [wire: number, start: number, stop: number])[]>>;

/** The reason to refuse a graph. */
class Unfit extends Error {}

/** Names of values under a rule: those that must be good, those of good values, and those of others. */
class Names {
  readonly must = new Set<string>();
  readonly #good = new Set<string>();
  readonly #bad = new Set<string>();

  add(name: string, isGood: boolean): void {
    (isGood ? this.#good : this.#bad).add(name);
  }

  /** Throws Unfit, saying why, unless those that must be are names of good values alone. */
  check(why: string): void {
    for (const name of this.must) {
      if (!this.#good.has(name) || this.#bad.has(name)) throw new Unfit(why);
    }
  }
}

/** One walk over the bytes of a model. */
class Walk {
  readonly #data: Bytes;
  readonly #many: boolean;
  readonly #predicts: boolean;
  #nodes = 0;
  #fields = 0;
  #opsets = 0;
  #versions = 0;
  /** The last value that each loop scans must be one that bounds a loop. */
  readonly #loops = new Names();
  /** How many inputs the node that is being read goes over, as its attributes say. */
  #scanned = 0;
  /** A divisor must be a constant by which a graph may divide. */
  readonly #divisors = new Names();

  /** many: whether the model takes many steps, so that a loop may scan the mask. predicts: whether it is a predict
   * graph, which may not divide by data.
   */
  constructor(data: Bytes, many: boolean, predicts: boolean) {
    [this.#data, this.#many, this.#predicts] = [data, many, predicts];
  }

  /** Throws Unfit unless the model names one operator set, with its version, its loops end, and its divisors are safe.
   *
   * All values that a loop scans have equally many rows.
   */
  check(): void {
    if (this.#opsets !== 1 || this.#versions !== 1) {
      throw new Unfit(`it must import one opset with one version, not ${this.#opsets} with ${this.#versions}`);
    }
    this.#loops.check(
      `the turns of a ${LOOP} have no bound: its last input must be the mask of a graph of many steps, or an ` +
        "initializer of one dimension with its values in raw_data, and have a name of its own",
    );
    this.#divisors.check(
      "it divides by data: a predict graph may divide by an initializer with its values in raw_data, none of " +
        "them the integers 0 and -1, and multiply by a Reciprocal",
    );
  }

  /** Check the message between two offsets. */
  message(kind: string, begin: number, end: number): void {
    this.#nodes += Number(`${kind}.op_type` in OPERATORS_IN);
    this.#opsets += Number(kind === "opset");
    if (this.#nodes > MOST_NODES) {
      throw new Unfit(`it has more than ${MOST_NODES} nodes`);
    }
    const places: Record<string, [wire: number, start: number, stop: number][]> = {};
    for (let at = begin; at < end; ) {
      const [number, wire, start, stop] = this.#field(at, end);
      const [field, inner] = FIELDS[kind]?.[number] ?? ["", ""];
      if (field === "") {
        throw new Unfit(`its ${kind} has a field ${number} that a plan's graph does not have`);
      }
      places[field] ??= [];
      places[field].push([wire, start, stop]);
      if (PLAIN.includes(inner)) {
        this.#value(`${kind}.${field}`, inner, wire, start, stop);
      } else if (wire === LENGTH) {
        this.message(inner, start, stop);
      } else {
        throw new Unfit(`${field} of its ${kind} is no message`);
      }
      at = stop;
    }
    this.#note(kind, places);
  }

  #noteLoop(inputs: readonly string[]): void {
    if (this.#scanned > inputs.length) {
      throw new Unfit(`a ${LOOP} goes over ${this.#scanned} inputs, and has ${inputs.length}`);
    }
    this.#loops.must.add(inputs.at(-1) ?? "");
  }

  /** Record the names that a message gives to values. */
  #note(kind: string, places: Places): void {
    const texts = (field: string) =>
      (places[field] ?? []).map(([, start, stop]) => text(this.#data.subarray(start, stop)));
    if (kind === "attribute" && texts("name").includes(SCANNED)) {
      for (const [wire, start, stop] of places["i"] ?? []) {
        this.#scanned = Math.max(this.#scanned, wire === VARINT ? this.#varint(start, stop)[0] : Infinity);
      }
    }
    if (kind === "node") {
      if (texts("op_type").at(-1) === LOOP) this.#noteLoop(texts("input"));
      this.#scanned = 0;
    }
    const vector = kind === "tensor" && this.#isVector(places);
    for (const name of kind in NAMES ? texts(NAMES[kind]!) : []) {
      this.#loops.add(name, vector || (this.#many && kind === "graph's input" && name === BOUND));
    }
    if (this.#predicts) {
      if (texts("op_type").some((operator) => DIVIDING.includes(operator))) {
        this.#divisors.must.add(texts("input")[1] ?? "");
      }
      const divides = kind === "tensor" && this.#divides(places);
      for (const name of kind in ALL_NAMES ? texts(ALL_NAMES[kind]!) : []) {
        this.#divisors.add(name, divides);
      }
    }
  }

  /** Whether a tensor is of floats, or of integers other than 0 and -1. */
  #divides(places: Places): boolean {
    const [[, at, end] = [], ...types] = places.data_type ?? [];
    const [[wire, start, stop] = [], ...further] = places.raw_data ?? [];
    if (at === undefined || wire !== LENGTH || types.length + further.length > 0) {
      return false;
    }
    const plain = Object.keys(places).every((field) => PLAIN_TENSOR.includes(field));
    const type = this.#varint(at, end!)[0];
    const size = INTEGER_BYTES[type];
    if (!plain || size === undefined) {
      return plain && FLOATS.includes(type);
    }
    const raw = this.#data.subarray(start, stop);
    const values = Array.from({ length: Math.ceil(raw.length / size) }, (_, place) =>
      raw.subarray(place * size, (place + 1) * size),
    );
    const minusOne = (value: Bytes) => size > 1 && value.every((byte) => byte === 0xff);
    return raw.length % size === 0 && !values.some((value) => value.every((byte) => byte === 0) || minusOne(value));
  }

  /** Whether a tensor has one dimension, and no more elements than bytes in the graph. */
  #isVector(places: Places): boolean {
    const [[wire, at, end] = [], ...further] = places.dims ?? [];
    const [, start, stop] = places.raw_data?.at(-1) ?? [];
    return (
      wire === VARINT && further.length === 0 && start !== undefined && this.#varint(at!, end!)[0] <= stop! - start
    );
  }

  #value(field: string, kind: string, wire: number, start: number, stop: number): void {
    if (kind === "text") {
      this.#text(field, wire, start, stop);
    } else if (kind === "element" || field === "opset.version") {
      const number = wire === VARINT ? this.#varint(start, stop)[0] : Number.NaN;
      if (kind === "element" && !ELEMENTS.has(number)) {
        throw new Unfit(`${field} is ${number}, which is no type of a plan's tensors`);
      }
      if (kind === "number" && number !== OPSET) {
        throw new Unfit(`it is of opset ${number}, a plan's graphs are of opset ${OPSET}`);
      }
      this.#versions += Number(kind === "number");
    }
  }

  #text(field: string, wire: number, start: number, stop: number): void {
    let found = "";
    try {
      found = text(this.#data.subarray(start, stop));
    } catch {
      wire = Number.NaN;
    }
    if (wire !== LENGTH) {
      throw new Unfit(`${field} is not text in UTF-8`);
    }
    if (OPERATORS_IN[field]?.has(found) === false) {
      throw new Unfit(`operator ${found.slice(0, 100)} is none that a plan may use`);
    }
    if (field === "attribute.name" && found === AXES) {
      throw new Unfit(`a ${LOOP} goes over another axis than the first`);
    }
    if (field.endsWith(".domain") && found !== "") {
      throw new Unfit(`${field} is ${found.slice(0, 100)}, a plan's operators are ONNX's own`);
    }
  }

  /** The field at an offset: its number, wire type, and the offsets where its content begins and ends. */
  #field(at: number, end: number): [number: number, wire: number, start: number, stop: number] {
    this.#fields += 1;
    if (this.#fields > MOST_FIELDS) {
      throw new Unfit(`it has more than ${MOST_FIELDS} fields`);
    }
    const [tag, start] = this.#varint(at, end);
    const [number, wire] = [Math.floor(tag / 8), tag % 8];
    const [begin, stop] = this.#content(wire, start, end);
    if (stop > end) {
      throw new Unfit("a field ends behind its message");
    }
    return [number, wire, begin, stop];
  }

  #content(wire: number, start: number, end: number): [begin: number, stop: number] {
    if (wire === VARINT) {
      return [start, this.#varint(start, end)[1]];
    }
    if (wire === LENGTH) {
      const [size, begin] = this.#varint(start, end);
      return [begin, begin + size];
    }
    if (wire === FIXED64 || wire === FIXED32) {
      return [start, start + (wire === FIXED64 ? 8 : 4)];
    }
    throw new Unfit(`there is no wire type ${wire}`);
  }

  /** The number at an offset, and the offset after it. Above 2^53 it is rounded, and of no use here. */
  #varint(at: number, end: number): [value: number, behind: number] {
    let [value, scale] = [0, 1];
    for (let place = at; place < Math.min(at + 10, end); place++, scale *= 128) {
      const byte = this.#data[place]!;
      value += (byte & 0x7f) * scale;
      if (byte < 0x80) {
        return [value, place + 1];
      }
    }
    throw new Unfit("a number does not end");
  }
}
