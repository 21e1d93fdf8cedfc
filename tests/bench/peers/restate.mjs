// Restate: handlers of ctx.run steps, invoked through its ingress; resume by resolving an awakeable.
// Arguments and the conversation on standard input and output are those of peer.py; the URL is a folder for
// the server's log.
//
// This process is the service and the conversation; the server, and the clients that invoke runs, are its
// children.

import { fork, spawn } from "node:child_process";
import { randomBytes } from "node:crypto";
import { createServer as createHttpServer } from "node:http2";
import { createServer } from "node:net";
import { createInterface } from "node:readline";
import * as restate from "@restatedev/restate-sdk";

// The SDK expects this of Node 22.
Promise.withResolvers ??= () => {
  const parts = {};
  parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }));
  return parts;
};

// As in peer.py.
const RUN_STEPS = 10, SERIAL_STEPS = 200, SERIAL_RUNS = 3, MESSAGES = 1600, PARKED = 100;
const PARK_MS = 1500, RESUME_MS = 6000, WARM_MS = 1500;

const PAYLOAD = randomBytes(512).toString("hex");
const [folder, workload, concurrency, seconds] = process.argv.slice(2);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const say = (what) => process.stdout.write(JSON.stringify(what) + "\n");

async function invoke(ingress, handler, count) {
  const url = `http://127.0.0.1:${ingress}/peer/${handler}`;
  const answer = await fetch(url, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(count),
  });
  if (!answer.ok) throw new Error(`${handler}: ${answer.status} ${await answer.text()}`);
  return answer.json();
}

// In a process of its own: clients that each invoke one run after another.
async function clients(ingress) {
  process.on("disconnect", () => process.exit());
  const client = async () => { for (;;) await invoke(ingress, "run", RUN_STEPS); };
  await Promise.all(Array.from({ length: +concurrency }, client));
}

function freePort() {
  return new Promise((found) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => found(port));
    });
  });
}

let steps = 0;
const began = [];
const parked = [];
let woke = () => {};

const step = () => { steps += 1; return PAYLOAD; };
const handlers = {
  run: async (context, count) => {
    for (let i = 0; i < count; i++) await context.run(`step-${i}`, step);
    return count;
  },
  converse: async (context, count) => {
    for (let i = 0; i < count; i++) {
      await context.run(`message-${i}`, () => { began.push(performance.now()); return PAYLOAD; });
    }
    return count;
  },
  wait: async (context) => {
    await context.run("before", step);
    const { id, promise } = context.awakeable();
    parked.push(id);
    await promise;
    await context.run("after", () => { woke(performance.now()); });
  },
};

async function startServer() {
  const [ingress, admin, node, service] = await Promise.all(Array.from({ length: 4 }, freePort));
  const platform = `${process.platform}-${process.arch}`;
  const binary = `node_modules/@restatedev/restate-server-${platform}/bin/restate-server`;
  const server = spawn(binary, ["--no-logo", `--base-dir=${folder}`, "--listen-mode=tcp"], {
    stdio: ["ignore", "ignore", "inherit"],
    env: {
      ...process.env,
      RESTATE_BIND_IP: "127.0.0.1",
      RESTATE_BIND_PORT: node,
      RESTATE_INGRESS__BIND_PORT: ingress,
      RESTATE_ADMIN__BIND_PORT: admin,
      RESTATE_DISABLE_TELEMETRY: "true",
      RESTATE_LOG_FILTER: "error",
    },
  });
  server.on("exit", (code) => { console.error(`restate-server ended: ${code}`); process.exit(1); });
  process.on("exit", () => server.kill("SIGKILL"));
  const endpoint = restate.createEndpointHandler({ services: [restate.service({ name: "peer", handlers })] });
  createHttpServer(endpoint).listen(service, "127.0.0.1");
  const uri = `http://127.0.0.1:${service}`;
  for (let tries = 0; ; tries++) {
    const answer = await fetch(`http://127.0.0.1:${admin}/deployments`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ uri }),
    }).catch(() => null);
    if (answer?.ok) break;
    if (tries === 150) throw new Error(`the server does not register the service: ${await answer?.text()}`);
    await sleep(100);
  }
  await invoke(ingress, "run", RUN_STEPS);
  return { ingress, pid: server.pid };
}

let lines;

// Says that the load runs and waits for the start of the count.
async function untilGo() {
  const go = new Promise((said) => lines.once("line", said));
  say({ ready: true });
  await go;
  return performance.now();
}

async function measure(ingress) {
  // Standard input is this process's own.
  const stdio = ["ignore", "ignore", "inherit", "ipc"];
  const child = fork(process.argv[1], ["clients", ingress, concurrency], { stdio });
  child.on("exit", () => process.exit(1));
  await sleep(WARM_MS);
  const start = await untilGo();
  const before = steps;
  await sleep(seconds * 1000);
  return { steps: steps - before, seconds: (performance.now() - start) / 1000 };
}

async function serial(ingress) {
  await invoke(ingress, "run", SERIAL_STEPS);
  const start = await untilGo();
  for (let i = 0; i < SERIAL_RUNS; i++) await invoke(ingress, "run", SERIAL_STEPS);
  return { steps: SERIAL_RUNS * SERIAL_STEPS, seconds: (performance.now() - start) / 1000 };
}

async function resume(ingress) {
  for (let i = 0; i < PARKED; i++) invoke(ingress, "wait", 0).catch(() => {});
  await sleep(PARK_MS);
  if (parked.length !== PARKED) throw new Error(`only ${parked.length} workflows parked`);
  const start = await untilGo();
  const delays = [];
  for (const id of parked) {
    if (performance.now() - start > RESUME_MS) break;
    const woken = new Promise((done) => { woke = done; });
    const sent = performance.now();
    await fetch(`http://127.0.0.1:${ingress}/restate/awakeables/${id}/resolve`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(PAYLOAD),
    });
    delays.push(await woken - sent);
    await sleep(10 + ((delays.length * 7) % 20));
  }
  return { steps: delays.length, seconds: (performance.now() - start) / 1000, delays_ms: delays };
}

async function growth(ingress) {
  await untilGo();
  await invoke(ingress, "converse", MESSAGES);
  const at = (message) => {
    const window = began.slice(message - 41, message);
    const took = window.slice(1).map((later, i) => later - window[i]).sort((a, b) => a - b);
    return took[took.length >> 2];
  };
  const seconds = (began.at(-1) - began[0]) / 1000;
  return { steps: MESSAGES, seconds, early_ms: at(100), late_ms: at(MESSAGES) };
}

if (folder === "clients") {
  await clients(workload);
} else {
  lines = createInterface({ input: process.stdin });
  lines.on("close", () => process.exit(1));
  const { ingress, pid } = await startServer();
  say({ up: true, server: pid });
  const measured = { queue: measure, serial, resume, growth }[workload];
  say(await measured(ingress));
  // Until measure.py has read the CPU time and ends it.
}
