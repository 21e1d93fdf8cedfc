"""DBOS Transact for Python: workflows in threads, directly and through its queue; resume by send → recv."""

import threading
import time

import peer
from dbos import DBOS, SetWorkflowID

cell = peer.cell()
steps = peer.Steps()
backlog = threading.Semaphore(2 * cell.concurrency)
began: list[float] = []
woken: dict[str, float] = {}
woke = threading.Condition()


@DBOS.step()
def store() -> str:
    steps.add()
    return peer.PAYLOAD


@DBOS.step()
def append() -> str:
    began.append(time.perf_counter())
    return peer.PAYLOAD


@DBOS.step()
def after(key: str) -> None:
    with woke:
        woken[key] = time.perf_counter()
        woke.notify()


@DBOS.workflow()
def run() -> None:
    for _ in range(peer.RUN_STEPS):
        store()
    backlog.release()


@DBOS.workflow()
def serial() -> float:
    start = time.perf_counter()
    for _ in range(peer.SERIAL_STEPS):
        store()
    return time.perf_counter() - start


@DBOS.workflow()
def converse() -> None:
    for _ in range(peer.MESSAGES):
        append()


@DBOS.workflow()
def wait(key: str) -> None:
    store()
    DBOS.recv("done", timeout_seconds=120)
    after(key)


def directly() -> None:
    while True:
        run()


def enqueue() -> None:
    while True:
        backlog.acquire()
        DBOS.enqueue_workflow("runs", run)


def load(clients: int, client) -> None:
    for _ in range(clients):
        threading.Thread(target=client, daemon=True).start()
    steps.measure(cell.seconds)


def resume() -> None:
    keys = [f"parked-{i}" for i in range(peer.PARKED)]
    for key in keys:
        with SetWorkflowID(key):
            DBOS.start_workflow(wait, key)
    time.sleep(peer.PARK_SECONDS)
    peer.until_go()
    start, delays = time.perf_counter(), []
    for key in keys:
        if time.perf_counter() - start > peer.RESUME_SECONDS:
            break
        sent = time.perf_counter()
        DBOS.send(key, peer.PAYLOAD, topic="done")
        with woke:
            while key not in woken:
                woke.wait()
        delays.append(woken[key] - sent)
        time.sleep(peer.pause(cell, len(delays)))
    peer.finish_resume(delays, time.perf_counter() - start)


def main() -> None:
    DBOS(
        config={
            "name": "peer",
            "system_database_url": cell.url,
            "sys_db_pool_size": min(cell.concurrency + peer.CREATORS, 40),
            "max_executor_threads": 160,
            "application_version": "1",
            "executor_id": f"peer-{time.time_ns()}",
            "log_level": "ERROR",
        }
    )
    DBOS.launch()
    if cell.workload == "queue":
        poll = {} if cell.poll is None else {"polling_interval_sec": cell.poll}
        DBOS.register_queue("runs", worker_concurrency=cell.concurrency, **poll)
    peer.up()
    match cell.workload:
        case "serial":
            serial()
            peer.until_go()
            peer.finish_serial([serial() for _ in range(peer.SERIAL_RUNS)])
        case "direct":
            load(cell.concurrency, directly)
        case "queue":
            load(peer.CREATORS, enqueue)
        case "resume":
            resume()
        case "growth":
            peer.until_go()
            converse()
            peer.finish_growth(began)


main()
