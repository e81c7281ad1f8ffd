"""Numbers that differ from device to device inside one program: a constant where all agree, else a table's column."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Int


class Tables:
    """Several tables with a row per device, laid side by side for one argument of a program.

    Attributes:
      table_WC: the columns whose values differ; at least one column, for programs need an argument.
    """

    def __init__(self, tables_Wn: Sequence[Int[np.ndarray, "W n"]]):
        self._places: list[list[tuple[bool, int]]] = []
        columns: list[np.ndarray] = []
        for table_Wn in tables_Wn:
            places: list[tuple[bool, int]] = []
            for column_W in table_Wn.T:
                same = bool((column_W == column_W[0]).all())
                places.append((same, int(column_W[0]) if same else len(columns)))
                if not same:
                    columns.append(column_W)
            self._places.append(places)
        empty_W1 = np.zeros((len(tables_Wn[0]), 1), np.int32)
        self.table_WC: Int[np.ndarray, "W C"] = np.stack(columns, axis=1).astype(np.int32) if columns else empty_W1

    def value(self, table: int, column: int, row_C: Int[Array, " C"]) -> Any:
        """What this device has in a column of a table: a Python number, or one read from its row of `table_WC`."""
        same, value = self._places[table][column]
        return value if same else row_C[value]

    def columns(self, table: int) -> range:
        """Numbers of a table's columns."""
        return range(len(self._places[table]))
