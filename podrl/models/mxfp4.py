"""Converts weights in MXFP4 (OCP Microscaling Formats 1.0), the format of gpt-oss, to bfloat16 without rounding."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from podrl.models.tensor_files import StoredTensor

_GROUP = 32  # number of values that share a scale
# Values of the 16 codes (E2M1: a sign, two bits of exponent, one of mantissa).
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BLOCKS, _SCALES = "_blocks", "_scales"
_BIAS = 127  # a scale s means 2 ** (s - 127)


@dataclasses.dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A tensor (E, inputs, outputs) whose values are computed from 4-bit codes and their scales when they are read.

    Attributes:
      blocks: codes (E, outputs, inputs / 32, 16), two in a byte, the earlier one in the low bits.
      scales: scales (E, outputs, inputs / 32).
    """

    blocks: StoredTensor
    scales: StoredTensor

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Computes the tensor, or the rectangular part `index`."""
        bounds = [s.indices(n)[:2] for s, n in zip(index, self.shape, strict=False)]
        bounds += [(0, n) for n in self.shape[len(bounds) :]]
        out = np.empty([stop - start for start, stop in bounds], self.dtype)
        self.read_into(out, tuple(slice(*b) for b in bounds))
        return out

    def read_into(self, out: np.ndarray, index: tuple[slice, ...] = ()) -> None:
        """Computes the tensor, or the part `index`, into an array of the same shape, one expert after another."""
        experts, inputs, outputs = index or tuple(slice(0, n) for n in self.shape)
        groups = slice(inputs.start // _GROUP, -(-inputs.stop // _GROUP))
        within = slice(inputs.start - groups.start * _GROUP, inputs.stop - groups.start * _GROUP)
        # Both tensors are opened once, before the loop: to open a remote tensor is to read all of it.
        code_EOGB, scale_EOG = self.blocks.as_bytes(), self.scales.as_bytes()
        for e in range(experts.start, experts.stop):
            code_OGB, scale_OG = (np.array(x[e, outputs, groups]) for x in (code_EOGB, scale_EOG))
            value_OGB2 = _VALUES[np.stack([code_OGB & 15, code_OGB >> 4], axis=-1)]
            value_OGX = value_OGB2.reshape(*scale_OG.shape, _GROUP)
            value_OGX = np.ldexp(value_OGX, scale_OG.astype(np.int32)[..., None] - _BIAS)
            out[e - experts.start] = value_OGX.reshape(len(scale_OG), -1)[:, within].T.astype(out.dtype)


def joined(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Replaces each pair of tensors NAME_blocks and NAME_scales by one tensor NAME of bfloat16.

    Args:
      stored: tensors of a checkpoint by name.

    Raises:
      ValueError: there are blocks without scales, or the types or shapes of a pair do not fit.
    """
    tensors = dict(stored)
    for name in [name for name in stored if name.endswith(_BLOCKS)]:
        plain = name.removesuffix(_BLOCKS)
        blocks, scales = tensors.pop(name), tensors.pop(plain + _SCALES, None)
        found = (blocks.code, blocks.shape), None if scales is None else (scales.code, scales.shape)
        if (
            scales is None
            or len(blocks.shape) != 4
            or found != (("U8", (*blocks.shape[:3], _GROUP // 2)), ("U8", blocks.shape[:3]))
        ):
            raise ValueError(
                f"Tensors {name} and {plain}{_SCALES} in {blocks.path} are {found[0]} and {found[1]}: MXFP4 has bytes "
                f"(U8) of shapes (experts, outputs, groups, {_GROUP // 2}) and (experts, outputs, groups)."
            )
        count, outputs, groups, _ = blocks.shape
        size = 2 * count * outputs * groups * _GROUP  # bytes of the values as bfloat16
        tensors[plain] = PackedTensor(
            plain, blocks.path, "BF16", (count, groups * _GROUP, outputs), 0, size, blocks=blocks, scales=scales
        )
    return tensors
