"""Packs arrays of the sample layout into the rows of any loss."""

import dataclasses

from podrl.types import Layout


def packed_rows(kind, placement, *, tokens_BT, mask_BT, kl_scale=1.0, **values_BT):
    """Packs arrays into a batch of `kind`, the row type of a loss, on the host; `values_BT` are the loss's other inputs
    per token, by name.

    Required inputs that are not passed are the mask, which is 1 on each sampled token; optional inputs are left out.
    """
    layout = placement.layout(tokens_BT)
    if kind is Layout:
        return placement.batch(layout)
    mask_ABT, length_ABT = placement.loss_tokens(mask_BT)
    made = {"layout": layout, "mask_BT": mask_ABT, "length_BT": length_ABT, "kl_scale": kl_scale}
    fields = {field.name: field for field in dataclasses.fields(kind)}
    names = {name for name, field in fields.items() if name in values_BT or field.default is not None}
    given = {name: placement.scatter(values_BT.get(name, mask_BT), where_BT=mask_BT) for name in names - made.keys()}
    return placement.batch(kind(**given, **{name: made[name] for name in names & made.keys()}))
