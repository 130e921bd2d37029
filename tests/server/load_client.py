"""Many streaming clients in a process of their own: load_client.py URL NUM_CLIENTS SECONDS SHARE_LEAVING

Each asks for one of `REQUESTS`, reads its stream, and asks again; some go away in the middle. Prints JSON: for each
request that was read to its end its number and its text, how many were left, and what went wrong.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

import aiohttp

REQUESTS = [
    {
        "prompt": f"{'Once upon a time ' * (i % 7)}{i} + {i * 7 % 10} =",
        "max_tokens": 4 + i * 5 % 60,
        "temperature": 0.9,
        "seed": i,
        "n": 1 + (i % 8 == 0),
    }
    for i in range(64)
]


async def main(url: str, num_clients: int, seconds: float, share_leaving: float) -> dict:
    ended: list[tuple[int, list[str]]] = []
    errors: list[str] = []
    num_left = 0
    until = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal num_left
        rng = random.Random(number)
        while time.monotonic() < until:
            which = rng.randrange(len(REQUESTS))
            leaves_after = rng.randrange(1, 5) if rng.random() < share_leaving else None
            try:
                texts = await ask(session, REQUESTS[which], leaves_after)
            except Exception as error:
                errors.append(repr(error))
            else:
                if texts is None:
                    num_left += 1
                else:
                    ended.append((which, texts))

    async def ask(session, request, leaves_after) -> list[str] | None:
        texts, num_chunks, is_done = [""] * request["n"], 0, False
        async with session.post(f"{url}/v1/completions", json=request | {"stream": True}) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    is_done = True
                elif data:
                    event = json.loads(data)
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
                num_chunks += 1
                if num_chunks == leaves_after:
                    answer.close()
                    return None
        if not is_done:
            raise RuntimeError("the stream broke off")
        return texts

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        await asyncio.gather(*(client(session, i) for i in range(num_clients)))
    return {"ended": ended, "num_left": num_left, "errors": errors}


if __name__ == "__main__":
    url, num_clients, seconds, share_leaving = sys.argv[1:]
    found = asyncio.run(main(url, int(num_clients), float(seconds), float(share_leaving)))
    print(json.dumps(found))
