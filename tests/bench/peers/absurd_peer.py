"""Absurd: tasks of steps through its queue, the only way to run one; resume by emit_event → await_event.

A client holds one connection, on which its tasks take turns, so a run in flight gets a client of its own.
"""

import asyncio
import os
import subprocess
import sys
import time

import peer
from absurd_sdk import AsyncAbsurd

QUEUE = "runs"

cell = peer.cell()
steps = peer.Steps()
backlog = asyncio.Semaphore(2 * cell.concurrency)
began: list[float] = []
woken: dict[str, asyncio.Future] = {}
done: asyncio.Future


async def store() -> str:
    steps.add()
    return peer.PAYLOAD


async def append() -> str:
    began.append(time.perf_counter())
    return peer.PAYLOAD


async def run(_, context) -> None:
    for i in range(peer.RUN_STEPS):
        await context.step(f"step-{i}", store)
    backlog.release()


async def serial(_, context) -> None:
    start = time.perf_counter()
    for i in range(peer.SERIAL_STEPS):
        await context.step(f"step-{i}", store)
    done.set_result(time.perf_counter() - start)


async def converse(_, context) -> None:
    for i in range(peer.MESSAGES):
        await context.step(f"message-{i}", append)
    done.set_result(None)


async def wait(key, context) -> None:
    async def after() -> None:
        woken[key].set_result(time.perf_counter())

    await context.step("before", store)
    await context.await_event(key)
    await context.step("after", after)


async def client() -> AsyncAbsurd:
    absurd = AsyncAbsurd(cell.url, queue_name=QUEUE)
    for task in (run, serial, converse, wait):
        absurd.register_task(name=task.__name__)(task)
    await absurd._ensure_connected()
    return absurd


async def work(workers: int) -> list[asyncio.Task]:
    poll = {} if cell.poll is None else {"poll_interval": cell.poll}
    clients = [await client() for _ in range(workers)]
    return [
        asyncio.create_task(absurd.start_worker(worker_id=f"{os.getpid()}-{i}", **poll))
        for i, absurd in enumerate(clients)
    ]


async def enqueue() -> None:
    absurd = await client()
    while True:
        await backlog.acquire()
        await absurd.spawn("run", {})


async def load() -> None:
    _running = await work(cell.concurrency) + [asyncio.create_task(enqueue()) for _ in range(peer.CREATORS)]
    await asyncio.to_thread(steps.measure, cell.seconds)


async def once(absurd: AsyncAbsurd, task: str):
    global done
    done = asyncio.get_running_loop().create_future()
    await absurd.spawn(task, {})
    return await done


async def resume(absurd: AsyncAbsurd) -> None:
    keys = [f"parked-{i}" for i in range(peer.PARKED)]
    for key in keys:
        woken[key] = asyncio.get_running_loop().create_future()
        await absurd.spawn("wait", key)
    await asyncio.sleep(peer.PARK_SECONDS)
    await asyncio.to_thread(peer.until_go)
    start, delays = time.perf_counter(), []
    for key in keys:
        if time.perf_counter() - start > peer.RESUME_SECONDS:
            break
        sent = time.perf_counter()
        await absurd.emit_event(key, peer.PAYLOAD)
        delays.append(await woken[key] - sent)
        await asyncio.sleep(peer.pause(cell, len(delays)))
    peer.finish_resume(delays, time.perf_counter() - start)


async def main() -> None:
    absurd = await client()
    row = await (await absurd._conn.execute("SELECT to_regnamespace('absurd') IS NULL")).fetchone()
    if row[0]:
        absurdctl = os.path.join(os.path.dirname(sys.executable), "absurdctl")
        environment = dict(os.environ, ABSURD_DATABASE_URL=cell.url)
        subprocess.run([absurdctl, "init"], env=environment, check=True, stdout=subprocess.DEVNULL)
        await absurd.create_queue(QUEUE)
    peer.up()
    if cell.workload == "queue":
        await load()
    _running = await work(4 if cell.workload == "resume" else 1)
    match cell.workload:
        case "serial":
            await once(absurd, "serial")
            await asyncio.to_thread(peer.until_go)
            peer.finish_serial([await once(absurd, "serial") for _ in range(peer.SERIAL_RUNS)])
        case "resume":
            await resume(absurd)
        case "growth":
            await asyncio.to_thread(peer.until_go)
            await once(absurd, "converse")
            peer.finish_growth(began)


asyncio.run(main())
