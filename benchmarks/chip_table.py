"""Writes the results of `benchmarks on_chip` as a page in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.rollout import least_bytes

Results = Mapping[str, Mapping[str, Any]]  # maps a part's name to its result, which has "figures" or "error"


def table(results: Results) -> str:
    """Writes the page: the device, then a section for each kind of part; for a failed part, its last line of output.

    Args:
      results: results of the parts by name; the part "device" must have figures.
    """
    device = results["device"]["figures"]
    lines = [f"# {device['devices']} x {device['kind']}", "", f"jax {device['jax']}. Made by `benchmarks on_chip`.", ""]
    lines += _rows(
        ("measured", "figure", "of the vendor's"),
        [
            (
                "matrix products, bfloat16",
                f"{device['matmul_flops'] / 1e12:.3g} TFLOP/s",
                _share(device["matmul_flops"], device["peak_flops"]),
            ),
            ("matrix products, float32", f"{device['matmul_flops_f32'] / 1e12:.3g} TFLOP/s", ""),
            (
                "memory, read and written",
                f"{device['hbm_rate'] / 1e9:.4g} GB/s",
                _share(device["hbm_rate"], device["hbm_rate_vendor"]),
            ),
            ("launch of a small program", f"{device['launch_us']:.3g} us", ""),
        ],
    )
    for title, prefix, heads, row in _SECTIONS:
        found = {name: result for name, result in results.items() if name.startswith(prefix)}
        if found:
            lines += ["", f"## {title}", ""]
            lines += _rows(
                ("part", *heads), [_row(name, result, row, len(heads), device) for name, result in found.items()]
            )
    return "\n".join(lines) + "\n"


def _row(name: str, result: Mapping[str, Any], row: Any, width: int, device: Mapping[str, Any]) -> Sequence[str]:
    if "figures" not in result:
        return (name, f"failed: {result['error'].splitlines()[-1]}", *[""] * (width - 1))
    return (name, *row(result["figures"], device))


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in cells]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _decode(figures: Mapping[str, Any], device: Mapping[str, Any]) -> Sequence[str]:
    """Compares a step's time with the time in which memory can deliver weights, live keys and values once."""
    rate = device["hbm_rate_vendor"] or device["hbm_rate"]
    least_s = least_bytes(figures, device["devices"]) / rate
    return (
        str(figures["lanes"]),
        f"{figures['tok_s']:,.0f}",
        f"{1e3 * figures['seconds'] / figures['decode_steps']:.3g}",
        f"{least_s / figures['seconds']:.0%}",
        f"{figures['host_share']:.0%}",
        f"{figures['warm_up_seconds']:.0f}",
    )


def _update(figures: Mapping[str, Any], device: Mapping[str, Any]) -> Sequence[str]:
    del device
    least_s = figures["mfu"] * figures["seconds"] * _ratio(figures["matmul_flops"], figures["peak_flops"])
    return (
        f"{figures['seconds']:.3g}",
        f"{least_s:.3g}" if least_s else "",
        f"{figures['tokens_per_second']:,.0f}",
        f"{figures['mfu']:.0%}",
        _share(figures["mfu"] * figures["matmul_flops"], figures["peak_flops"]),
        f"{figures['peak_bytes'] / 2**30:.3g}",
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _move(figures: Mapping[str, Any], device: Mapping[str, Any]) -> Sequence[str]:
    del device
    names = ("median_ms", "publish_ms", "device_put_ms", "gb_s", "speedup")
    return [f"{figures[name]:.3g}" for name in names]


def _agree(figures: Mapping[str, Any], device: Mapping[str, Any]) -> Sequence[str]:
    del device
    return [f"{figures[name]:.3g}" for name in ("tokens", "entropy", "mean", "p99", "max")]


def _kernels(figures: Mapping[str, Any], device: Mapping[str, Any]) -> Sequence[str]:
    del device
    return [f"{figures[f'{form}_error']:.2g}" for form in _FORMS]


def _grpo(figures: Mapping[str, Any], device: Mapping[str, Any]) -> Sequence[str]:
    del device
    return (
        f"{figures['steps_per_hour']:,.0f}",
        *(f"{figures[name]:.3g}" if name in figures else "" for name in _OF_STEP),
    )


def _planned(figures: Mapping[str, Any], device: Mapping[str, Any]) -> Sequence[str]:
    del device
    step = figures["step"]
    return ("yes" if figures["fits"] else "no", *(f"{step[name]:.3g}" for name in ("step_s", "rollout_s", "trainer_s")))


_FORMS = ("reference", "blockwise", "splash", "prefix", "decode", "decode_kernel")
_OF_STEP = ("step_s", "rollout_s", "update_s", "publish_s", "waiting_s", "tokens_per_s_per_device", "sampler_abs_diff")
_SECTIONS = (
    (
        "Decoding, bfloat16",
        "decode",
        ("lanes", "tokens/s", "ms a step", "of the memory bound", "host", "s to compile"),
        _decode,
    ),
    (
        "Update, bfloat16",
        "update",
        ("s", "least s at peak", "tokens/s", "of measured products", "MFU", "GiB at most"),
        _update,
    ),
    (
        "Weight move, float32 to bfloat16",
        "move",
        ("ms", "ms with checksums", "ms of device_put", "GB/s", "times device_put"),
        _move,
    ),
    (
        "Sampler and trainer, bfloat16, nats",
        "agree",
        ("tokens", "entropy", "mean", "p99", "max"),
        _agree,
    ),
    ("Forms of attention, largest error over largest value", "kernels", _FORMS, _kernels),
    (
        "GRPO steps as podrl.plan predicts them, at the chip's published rates",
        "grpo-plan",
        ("fits", "step_s", "rollout_s", "update_s"),
        _planned,
    ),
    (
        "GRPO steps, devices shared",
        "grpo-S",
        ("steps/h", *_OF_STEP),
        _grpo,
    ),
)
