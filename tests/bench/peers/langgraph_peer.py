"""LangGraph with its Postgres checkpointer: graphs of one node, the step; interrupt → Command(resume).

`durability="sync"`: what a step returned is stored before the next begins, as with the other peers. Steps
replace one 1 KiB value, so that the state stays small, except in the growing conversation, whose messages
are a list with a reducer (`growth`) or, the same, in a DeltaChannel (`growth-delta`).
"""

import asyncio
import operator
import time
import uuid
from typing import Annotated, TypedDict

import peer
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

cell = peer.cell()
steps = peer.Steps()
began: list[float] = []
woken: dict[str, float] = {}


class State(TypedDict):
    left: int
    last: str


class Conversation(TypedDict):
    left: int
    messages: Annotated[list, operator.add]


def extend(messages: list, writes: list[list]) -> list:
    return messages + [message for write in writes for message in write]


class DeltaConversation(TypedDict):
    left: int
    messages: Annotated[list, DeltaChannel(extend)]


async def store(state: State) -> dict:
    steps.add()
    return {"left": state["left"] - 1, "last": peer.PAYLOAD}


# Without a type, which would add its schema to the graph's.
async def append(state) -> dict:
    began.append(time.perf_counter())
    return {"left": state["left"] - 1, "messages": [peer.PAYLOAD]}


async def ask(_: State) -> dict:
    return {"last": interrupt("go on?")}


async def after(state: State, config) -> dict:
    woken[config["configurable"]["thread_id"]] = time.perf_counter()
    return {"left": 0}


def loop(saver, schema, step):
    """A graph that runs one node until nothing is left."""
    graph = StateGraph(schema)
    graph.add_node("step", step)
    graph.add_edge(START, "step")
    graph.add_conditional_edges("step", lambda state: "step" if state["left"] > 0 else END)
    return graph.compile(checkpointer=saver)


def asking(saver):
    """A graph that stores, waits for an answer, and goes on."""
    graph = StateGraph(State)
    for name, node in (("store", store), ("ask", ask), ("after", after)):
        graph.add_node(name, node)
    for edge in ((START, "store"), ("store", "ask"), ("ask", "after"), ("after", END)):
        graph.add_edge(*edge)
    return graph.compile(checkpointer=saver)


async def invoke(graph, given, thread: str | None = None) -> None:
    config = {"configurable": {"thread_id": thread or str(uuid.uuid4())}, "recursion_limit": 10_000}
    await graph.ainvoke(given, config, durability="sync")


async def directly(pool) -> None:
    # A saver does one thing at a time, however many connections its pool has, so each client has its own.
    graph = loop(AsyncPostgresSaver(pool), State, store)
    while True:
        await invoke(graph, {"left": peer.RUN_STEPS, "last": ""})


async def serial(graph) -> float:
    start = time.perf_counter()
    await invoke(graph, {"left": peer.SERIAL_STEPS, "last": ""})
    return time.perf_counter() - start


async def resume(graph) -> None:
    threads = [f"parked-{i}" for i in range(peer.PARKED)]
    for thread in threads:
        await invoke(graph, {"left": 1, "last": ""}, thread)
    await asyncio.to_thread(peer.until_go)
    start, delays = time.perf_counter(), []
    for thread in threads:
        if time.perf_counter() - start > peer.RESUME_SECONDS:
            break
        sent = time.perf_counter()
        await invoke(graph, Command(resume=peer.PAYLOAD), thread)
        delays.append(woken[thread] - sent)
        await asyncio.sleep(peer.pause(cell, len(delays)))
    peer.finish_resume(delays, time.perf_counter() - start)


async def converse(graph) -> None:
    await asyncio.to_thread(peer.until_go)
    await invoke(graph, {"left": peer.MESSAGES, "messages": []})
    peer.finish_growth(began)


async def main() -> None:
    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    size = max(cell.concurrency, 2)
    async with AsyncConnectionPool(cell.url, min_size=size, max_size=size, kwargs=options) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        peer.up()
        graph = loop(saver, State, store)
        match cell.workload:
            case "serial":
                await serial(graph)
                await asyncio.to_thread(peer.until_go)
                peer.finish_serial([await serial(graph) for _ in range(peer.SERIAL_RUNS)])
            case "direct":
                _running = [asyncio.create_task(directly(pool)) for _ in range(cell.concurrency)]
                await asyncio.to_thread(steps.measure, cell.seconds)
            case "resume":
                await resume(asking(saver))
            case "growth":
                await converse(loop(saver, Conversation, append))
            case "growth-delta":
                await converse(loop(saver, DeltaConversation, append))


asyncio.run(main())
