"""Sizes of the tiles in which the TPU kernels multiply rows by the matrices of their experts.

The kernels (megablox) compute a tile of rows once for each expert that has rows in the tile. In a decode step an expert
has a few rows, so with large tiles most products are thrown away. For every tile of rows the kernels read an expert's
matrix again, unless one tile holds the whole contracted dimension. A tile therefore has only as many rows as keep the
matrix unit busy, and as much of the matrix as near memory (VMEM) holds.
"""

from collections.abc import Callable

ROWS = 512  # largest number of rows of a tile; the number of rows is padded to a multiple of it
_LEAST_ROWS = 128  # with fewer, the matrix unit waits for weights
_TILES = 4  # a tile has more than _LEAST_ROWS rows only if an expert fills this many of the larger tiles
_PADDING = 1 / 8  # largest share by which padding between experts may lengthen the arrays of rows
_LANES = 128  # a tile's width is a multiple of this, or the whole dimension
_CONTRACTED, _OTHER = 4096, 1024  # largest widths of a tile along the contracted and along the other dimension
_WASTED = 0.07  # a dimension's last tile may reach beyond the dimension by at most this share of the dimension's size
_NEAR_BYTES = 12 << 20  # bytes to use; a kernel has 16 MiB of near memory on the smallest chip


def row_tile(rows: float) -> int:
    """Returns the number of rows of a tile.

    Args:
      rows: mean number of rows of an expert.
    """
    tile = _LEAST_ROWS
    while tile < ROWS and 2 * tile * _TILES <= rows:
        tile *= 2
    return tile


def alignment(rows: float, parts: int) -> int:
    """Returns the number of which each expert's first row is a multiple: the rows of a tile, or 1.

    An expert whose rows begin inside a tile usually touches one tile more, and computes all rows of it. Padding between
    experts avoids this, but lengthens the arrays of rows, by up to a tile for each expert on this device.

    Args:
      rows: mean number of rows of an expert.
      parts: number of devices that the layer's experts are split over. The arrays of rows have room for the rows of all
        experts, so padding lengthens them by a smaller share if there are more parts.
    """
    tile = row_tile(rows)
    return tile if tile <= _PADDING * rows * parts else 1


def for_rows(rows: float, contracted: int, outputs: int, item: int) -> tuple[int, int, int]:
    """Returns the tile sizes (rows, contracted dimension, outputs) of a product of rows with matrices.

    Args:
      rows: mean number of rows of an expert.
      contracted, outputs: sizes of the matrices' dimensions.
      item: bytes of a number.
    """
    # The sum of a tile's products is kept in float32.
    return _largest(row_tile(rows), (contracted, _CONTRACTED), (outputs, _OTHER), item, lambda rows, x, y: rows * y)


def for_outer(rows: float, left: int, right: int, item: int) -> tuple[int, int, int]:
    """Returns the tile sizes (rows, left dimension, right dimension) of outer products summed over an expert's rows.

    Arguments are those of `for_rows`.
    """
    return _largest(row_tile(rows), (left, _OTHER), (right, _OTHER), item, lambda rows, x, y: x * y)


def _largest(
    tile: int,
    first: tuple[int, int],
    second: tuple[int, int],
    item: int,
    summed: Callable[[int, int, int], int],
) -> tuple[int, int, int]:
    """Returns (rows, x, y), the largest tile that near memory holds.

    Args:
      tile: number of rows.
      first, second: (size, largest width of a tile) of the other two dimensions.
      item: bytes of a number.
      summed: function (rows, x, y) -> number of float32 sums.
    """
    for x in _widths(*first):
        for y in _widths(*second):
            # Operands and the result are held twice: one copy is in use while the other is moved.
            if 2 * item * (tile * x + x * y + tile * y) + 4 * summed(tile, x, y) <= _NEAR_BYTES:
                return tile, x, y
    return tile, _LANES, _LANES


def _widths(size: int, most: int) -> list[int]:
    """Lists possible widths of tiles of a dimension, the largest first."""
    whole = [size] if size <= most else []
    cut = range(min(most, size) // _LANES * _LANES, 0, -_LANES)
    return whole + [width for width in cut if -(-size // width) * width <= (1 + _WASTED) * size]
