"""An agent that uses all of asyncio's manners inside its methods."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from typing import Any

import aiohttp
from aiohttp import web

import populace
from populace import Agent

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


class Manners(Agent):
    def __init__(self) -> None:
        self.log: list[str] = []

    async def timeout_expires(self) -> str:
        try:
            async with asyncio.timeout(0.02):
                await asyncio.sleep(10)
        except TimeoutError:
            return "timed out"
        return "not"

    async def timeout_over_platform_sleep(self) -> str:
        try:
            async with asyncio.timeout(0.02):
                await self.sleep(10)
        except TimeoutError:
            return "timed out"
        return "not"

    async def timeout_not_needed(self) -> str:
        async with asyncio.timeout(5):
            await asyncio.sleep(0.01)
        return "in time"

    async def wait_for(self) -> str:
        try:
            await asyncio.wait_for(asyncio.sleep(10), 0.02)
        except TimeoutError:
            return await asyncio.wait_for(self._value("ok"), 1)
        return "not"

    async def _value(self, value: Any) -> Any:
        await asyncio.sleep(0.005)
        return value

    async def gather(self) -> list[int]:
        return list(await asyncio.gather(*(self._value(i) for i in range(5))))

    async def group(self) -> int:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._value(i)) for i in range(5)]
        return sum(t.result() for t in tasks)

    async def group_fails(self) -> str:
        async def bad() -> None:
            await asyncio.sleep(0.005)
            raise ValueError("in the group")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(bad())
                group.create_task(asyncio.sleep(10))
        except ExceptionGroup as error:
            return f"{type(error.exceptions[0]).__name__} {len(error.exceptions)}"
        return "not"

    async def group_parent_waits_outside(self) -> str:
        """A child's failure has to cancel the parent at its own await."""

        async def bad() -> None:
            await asyncio.sleep(0.005)
            raise ValueError("child")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(bad())
                await self.sleep(10)
        except ExceptionGroup as error:
            task = asyncio.current_task()
            assert task is not None
            return f"{type(error.exceptions[0]).__name__} cancelling={task.cancelling()}"
        return "not"

    async def queue_and_lock(self) -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        lock = asyncio.Lock()

        async def produce() -> None:
            for i in range(5):
                async with lock:
                    await queue.put(i)

        producer = asyncio.ensure_future(produce())
        found = [await queue.get() for _ in range(5)]
        await producer
        return found

    async def shield(self) -> str:
        inner = asyncio.ensure_future(self._value("kept"))
        try:
            await asyncio.wait_for(asyncio.shield(inner), 0.001)
        except TimeoutError:
            return str(await inner)
        return "not"

    async def contextvars(self) -> list[str]:
        seen = [colour.get()]
        colour.set("blue")
        await asyncio.sleep(0.005)
        seen.append(colour.get())
        await self.sleep(0.005)
        seen.append(colour.get())

        async def child() -> str:
            before = colour.get()
            colour.set("green")
            return before

        seen.append(await asyncio.ensure_future(child()))
        seen.append(colour.get())
        return seen

    async def current_task(self) -> list[bool]:
        task = asyncio.current_task()
        assert task is not None
        before = task.done()
        ref = weakref.ref(task)
        await asyncio.sleep(0)
        same = asyncio.current_task() is task
        text = bool(task.get_name()) and task.get_coro() is not None
        return [not before, same, text, ref() is task, bool(task.get_stack())]

    async def cancels_itself(self) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel("enough")
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError as error:
            assert task.cancelling() == 1
            task.uncancel()
            await asyncio.sleep(0.001)
            return f"{error.args} {task.cancelling()}"
        return "not"

    async def cleans_up(self, witness: Any) -> None:
        await witness.note(0)
        try:
            await self.sleep(100)
        finally:
            self.log.append("cleaning")
            await asyncio.sleep(0.01)
            self.log.append("clean")

    def read(self) -> list[str]:
        return self.log

    async def swallows(self, witness: Any) -> str:
        await witness.note(0)
        try:
            await self.sleep(100)
        except asyncio.CancelledError:
            self.log.append("swallowed")
        return "went on"

    async def to_thread(self) -> int:
        return await asyncio.to_thread(sum, [1, 2, 3])

    async def same_future_twice(self) -> list[int]:
        future = asyncio.ensure_future(self._value(7))
        return [await future, await future]

    async def done_future(self) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(3)
        return await future

    async def failed_future(self) -> str:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.005, future.set_exception, KeyError("late"))
        try:
            await future
        except KeyError as error:
            return str(error)
        return "not"

    async def odd_awaitable(self) -> str:
        class Strange:
            def __await__(self) -> Any:
                yield "nonsense"

        try:
            await Strange()
        except RuntimeError as error:
            return str(error)
        return "not"

    async def async_generators(self) -> int:
        async def numbers() -> Any:
            for i in range(4):
                await asyncio.sleep(0)
                yield i

        return sum([i async for i in numbers()])

    async def http(self) -> str:
        async def hello(_: web.Request) -> web.Response:
            return web.Response(text="hello")

        async def slow(_: web.Request) -> web.Response:
            await asyncio.sleep(10)
            return web.Response(text="slow")

        app = web.Application()
        app.router.add_get("/", hello)
        app.router.add_get("/slow", slow)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/") as reply:
                    text = await reply.text()
                try:
                    timeout = aiohttp.ClientTimeout(total=0.05)
                    async with session.get(f"http://127.0.0.1:{port}/slow", timeout=timeout):
                        text += " not"
                except TimeoutError:
                    text += " timed out"
        finally:
            await runner.cleanup()
        return text

    async def sleeps(self) -> bool:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await populace.sleep(0.05)
        await self.sleep(0)
        # Differences of two readings of a clock in milliseconds are off by a rounding error.
        return 0.05 - 1e-6 <= loop.time() - began < 30

    async def collected(self) -> bool:
        gc.collect()
        await self.sleep(0.001)
        return True
