"""The process that maps records by a user's function: `python -m podrl.data.mapper`, started by podrl.data.transforms.

It never imports jax.
"""

import json
from collections.abc import Callable, Sequence

from podrl.mappings import JsonObject, Record
from podrl.workers import child, frames
from podrl.workers.user_objects import explain, short


def main() -> None:
    """Serves requests until the parent closes the pipe; the argument is a podrl.workers.user_code.Limits as JSON."""
    child.serve(lambda function, spec: {}, mapped)


def mapped(function: Callable[..., object], records: Sequence[Record]) -> JsonObject:
    """Applies a function to records: {'records': results}, or {'raised': error, 'record': index of the record}."""
    results: list[object] = []
    left = frames.MOST_BYTES // 2  # the other half of a message is room for the JSON around the records
    for i, record in enumerate(records):
        try:
            results.append(function(record))
            left -= len(json.dumps(results[-1]))
        except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises
            return {"raised": explain(error), "record": i}
        if results[-1] is not None and not isinstance(results[-1], dict):
            return {"raised": f"it returned {short(results[-1])}, neither a dict nor None", "record": i}
        if left < 0:
            more = f"more than {frames.MOST_BYTES // 2} bytes of JSON"
            return {"raised": f"it returned {more} for this record and the {i} before it", "record": i}
    return {"records": results}


if __name__ == "__main__":
    main()
