"""Prefills tokens: cuts sequences into chunks that fit the prefill programs, and packs chunks into full calls."""

from collections.abc import Iterator, Sequence

import numpy as np

from podrl.engine.device import Device
from podrl.engine.state import EngineShape, PrefillChunk
from podrl.mesh.backlog import IN_FLIGHT


def cut_chunks(
    shape: EngineShape,
    shard: int,
    tokens: Sequence[int] | np.ndarray,
    start: int,
    prior: Sequence[tuple[int, int, int]],
    pages: Sequence[int],
    offset: int = 0,
    places: tuple[int, int] = (0, 0),
) -> list[PrefillChunk]:
    """Cuts the tokens of a sequence into chunks of at most the largest bucket.

    Each chunk attends to the pages `prior` and to the chunks before it.

    Args:
      shape: sizes of the engine.
      shard: number of the shard whose pool holds the sequence.
      tokens: token ids to prefill.
      start: position of the first token.
      prior: (page, start, count) of the pages that hold the earlier tokens, without the first of `pages`, which may
        hold some of them, too.
      pages: indices of the pages for the new keys and values, `page_tokens` tokens each.
      offset: number of tokens that the first of `pages` holds already.
      places: place from which the memory of linear attention before the tokens is read, and place to which the memory
        after them is written (`EngineShape.places`).

    Returns:
      The chunks, in order.
    """
    C, largest = shape.page_tokens, shape.buckets[-1]
    chunks = []
    for at in range(0, len(tokens), largest):
        part, place = np.asarray(tokens[at : at + largest], np.int32), offset + at
        own = [(page, start - offset + j * C, min(C, place - j * C)) for j, page in enumerate(pages[: -(-place // C)])]
        targets = pages[place // C : -(-(place + len(part)) // C)]
        begins = places[1] if chunks else places[0]
        chunks.append(PrefillChunk(shard, part, start + at, [*prior, *own], targets, place % C, begins, places[1]))
    return chunks


def packed_calls(
    shape: EngineShape, shards: int, sequences: Sequence[Sequence[PrefillChunk]]
) -> Iterator[tuple[int, np.ndarray]]:
    """Packs the chunks of several sequences into prefill calls; chunks of one sequence stay in order.

    Yields:
      (bucket, packed rows as `EngineShape.pack_chunks` makes them) of each call.
    """
    for wave in range(max((len(chunks) for chunks in sequences), default=0)):
        queues: dict[int, dict[int, list[PrefillChunk]]] = {}
        for chunks in sequences:
            if wave < len(chunks):
                bucket = next(b for b in shape.buckets if b >= len(chunks[wave].tokens))
                queues.setdefault(bucket, {}).setdefault(chunks[wave].shard, []).append(chunks[wave])
        for bucket, by_shard in sorted(queues.items()):
            rows = shape.prefill_rows(bucket)
            # The row with the most prior pages decides how long a call takes, so rows with similar numbers go together.
            for queue in by_shard.values():
                queue.sort(key=lambda chunk: len(chunk.prior))
            for at in range(0, max(len(q) for q in by_shard.values()), rows):
                batch = [chunk for queue in by_shard.values() for chunk in queue[at : at + rows]]
                yield bucket, shape.pack_chunks(shards, bucket, batch)


def run_chunks(device: Device, sequences: Sequence[Sequence[PrefillChunk]]) -> int:
    """Prefills the chunks of several sequences, in full calls (`packed_calls`).

    Returns:
      The number of calls.
    """
    number = 0
    calls = packed_calls(device.engine.shape, device.engine.shards, sequences)
    for number, (bucket, flat_BI) in enumerate(calls, 1):
        device.prefill(bucket, flat_BI, number % IN_FLIGHT == 0)
    return number
