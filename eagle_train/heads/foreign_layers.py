"""Which target layers a head made elsewhere reads: two ways of counting under one name.

vLLM and speculators name at the top level the layer that a state enters (hs[v]); SGLang, SpecForge and
ModelOpt name in ``eagle_config`` the layer that it leaves (hs[v + 1]).
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle_train.errors import UserError
from eagle_train.heads.config import default_layers


def hs_ids(top: Sequence[int], nested: Sequence[int], depth: int | None, where: str) -> tuple[int, ...]:
    """Return the captured layers as hs ids, () for what every reader takes without ids.

    `top` and `nested` are the lists at the two places, () where there is none; `depth` is n of the target,
    None where not known. States are captured low to high whatever the order of the ids. Raises UserError
    where more than one reading is left.
    """
    entering, leaving = tuple(sorted(top)), tuple(sorted(nested))
    if not entering and not leaving:
        return ()
    as_outputs = tuple(k + 1 for k in leaving or entering)
    if entering and leaving and entering == as_outputs:
        return entering
    usual = default_layers(depth) if depth is not None and depth >= 7 else None
    if not entering and usual is not None and usual in (leaving, as_outputs):
        return usual
    if not leaving and as_outputs != usual:
        return entering
    if not entering and depth is None:
        raise UserError(
            f"{where}: layer ids {list(leaving)} in eagle_config, which some count from layers' inputs and "
            "others from outputs; give --target, whose depth may tell, or --layer-ids"
        )
    first, second = (",".join(map(str, ids)) for ids in (entering or leaving, as_outputs))
    raise UserError(
        f"{where}: layer ids may mean hs[{first}] (as vLLM reads them) or hs[{second}] (as SGLang does); "
        f"say --layer-ids {first} or --layer-ids {second}"
    )
