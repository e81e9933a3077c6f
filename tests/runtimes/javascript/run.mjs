// Runs a folder in a JavaScript package: onnxruntime-web, or transformers.js by its class for a task.
//
// node run.mjs PACKAGES NAME FOLDER GIVEN FOUND: tensors are in JSON files, by their names, as
// {dtype, dims, data} with the bytes in base64. NAME is the package's, or the class's. What the
// package throws is written as {"error": ...}.
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

const ARRAYS = { float32: Float32Array, int64: BigInt64Array, bool: Uint8Array };
const [packages, name, folder, given, found] = process.argv.slice(2);

function load(wanted) {
  const require = createRequire(join(packages, "package.json"));
  return import(pathToFileURL(require.resolve(wanted)).href);
}

function read(Tensor) {
  const tensors = {};
  for (const [input, { dtype, dims, data }] of Object.entries(JSON.parse(readFileSync(given)))) {
    const bytes = Uint8Array.from(Buffer.from(data, "base64"));
    tensors[input] = new Tensor(dtype, new ARRAYS[dtype](bytes.buffer), dims);
  }
  return tensors;
}

function written({ type, data, dims }) {
  const bytes = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
  return { dtype: type, dims: dims.map(Number), data: bytes.toString("base64") };
}

async function web() {
  const ort = await load(name);
  ort.env.wasm.numThreads = 1;
  const file = join(folder, "model.onnx");
  const data = `${file}_data`;
  const externalData = existsSync(data) ? [{ path: basename(data), data: readFileSync(data) }] : [];
  const session = await ort.InferenceSession.create(readFileSync(file), { externalData });
  const results = Object.entries(await session.run(read(ort.Tensor)));
  return Object.fromEntries(results.map(([output, tensor]) => [output, written(tensor)]));
}

async function transformers() {
  const { [name]: Class, Tensor, env } = await load("@huggingface/transformers");
  env.allowRemoteModels = false;
  env.localModelPath = dirname(folder);
  const model = await Class.from_pretrained(basename(folder), { dtype: "fp32", subfolder: "" });
  const { new: count, ...inputs } = read(Tensor);
  if (count === undefined) return { logits: written((await model(inputs)).logits) };
  const wanted = { max_new_tokens: Number(count.data[0]), do_sample: false };
  return { tokens: written(await model.generate({ ...inputs, ...wanted })) };
}

let outcome;
try {
  outcome = await (name.startsWith("onnxruntime-web") ? web() : transformers());
} catch (error) {
  outcome = { error: String(error?.message ?? error) };
}
writeFileSync(found, JSON.stringify(outcome));
