"""What differs between checkpoint forms and model families, kept in one place."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_train import hub
from eagle_train.data.config_file import check_config_file
from eagle_train.data.gguf_file import dequantised, gguf_source
from eagle_train.errors import UserError
from eagle_train.folders import refuse_as_target
from eagle_train.targets import plans
from eagle_train.targets.generation import check_file
from eagle_train.targets.headers import local_tensors
from eagle_train.targets.packed import quantisation, refuse_packed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# what reading a checkpoint raises where it is not as its library wants it
ODD = (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, AttributeError, AssertionError)


def load_model(
    target: str,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
    device_map: str | dict[str, Any] | None,
    by_plan: bool = False,
) -> PreTrainedModel:
    """Load a causal language model; `dtype` None means the default for its checkpoint and the device.

    `by_plan`: this process's part of it, as transformers' tensor-parallel plan cuts it.
    """
    from transformers import AutoModelForCausalLM

    where, source = _source(target)
    config = load_config(target, trust_remote_code)
    with explained(target), quiet():
        if (file := _file_of(where, "generation_config.json", config)) is not None:
            check_file(file, target)
    if dtype is None:
        dtype = default_dtype(config, device, is_gguf=bool(source))
    if device_map is None and getattr(config, "quantization_config", None) is not None:
        device_map = {"": str(device)}  # some kinds of packed weights cannot be moved once they are loaded
    arguments: dict[str, Any] = {**source, "trust_remote_code": trust_remote_code}
    with explained(target), quiet(), _value_named(target, config):
        if device_map is not None:
            arguments["device_map"] = device_map
        if by_plan:
            arguments.update(plans.arguments())
        if source:
            arguments.update(dequantised())
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, output_loading_info=True, **arguments
        )
    model, report = loaded
    if not source:
        with explained(target):
            refuse_packed(target, config, model, local_tensors(target, config))
    _refuse_incomplete(target, report)
    if by_plan:
        return model
    if device_map is not None:
        _say_spilled(model)
        return model
    try:
        return model.to(device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        raise UserError(
            f"{target}: {size / 2**30:.1f} GiB of weights do not go onto {device} ({_first_line(error)}); "
            "use bf16, a device with more room, or --device-map auto of eval, extract and regenerate"
        ) from error


def load_config(target: str, trust_remote_code: bool) -> PretrainedConfig:
    """Load the target's config alone.

    Raises UserError when it can't be found, when it describes no model, or names a quantisation that
    transformers does not know: loading would take packed weights for plain ones and leave their scales out.
    """
    from transformers import AutoConfig
    from transformers.quantizers import AutoHfQuantizer

    where, source = _source(target)
    with explained(target), quiet():
        if not source and (file := _file_of(where, "config.json")) is not None:
            check_config_file(file, target)
        try:
            config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **source)
        except (KeyError, AttributeError, TypeError, ArithmeticError) as error:
            raise UserError(
                f"{target}: config.json: {_first_line(error)}; correct it, or fetch it again"
            ) from error
        packing = getattr(config, "quantization_config", None)
        if not isinstance(packing, dict) or AutoHfQuantizer.supports_quant_method(packing):
            return config
    raise UserError(
        f"{target}: quantised by {quantisation(config)}, which the installed transformers does not know; use "
        "another checkpoint of this model, or a transformers that reads it"
    )


def _file_of(where: str, name: str, config: PretrainedConfig | None = None) -> Path | None:
    """Return a JSON file of the target, fetched where it is on the hub; None where it has none."""
    from transformers.utils import cached_file

    found = cached_file(
        where,
        name,
        revision=getattr(config, "_commit_hash", None),
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return None if found is None else Path(found)


def skeleton(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model that `config` describes, without memory for its weights."""
    from transformers import AutoModelForCausalLM

    name = config.name_or_path or "target"
    with explained(name), quiet(), _value_named(name, config), torch.device("meta"):
        # float32, for torch makes no layers in fp8, which a config may name
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        model.tie_weights()
    return model


def _source(target: str) -> tuple[str, dict[str, Any]]:
    """Split `target` into the place to load from and the extra arguments that a .gguf file needs."""
    path = Path(target)
    if target.endswith(".gguf"):
        return gguf_source(target)
    refuse_as_target(target)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"{target}: holds no config.json; wanted a model directory in Hugging Face form")
    if not path.is_dir() and (path.is_file() or target.startswith((".", "/", "~")) or target.count("/") > 1):
        raise UserError(f"{target}: no such directory; wanted a model directory, a .gguf file or a hub id")
    return target, {}


def default_dtype(config: PretrainedConfig, device: torch.device, is_gguf: bool) -> torch.dtype:
    """Return bf16 for a half-precision checkpoint on a device that computes in bf16, else fp32."""
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    half = is_gguf or str(stored).removeprefix("torch.") in ("bfloat16", "float16")
    return torch.bfloat16 if half and computes_in_bf16(device) else torch.float32


def computes_in_bf16(device: torch.device) -> bool:
    """True where bf16 products run in hardware rather than in emulation."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        flags = _cpu_flags()
        return "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags
    return False


def _cpu_flags() -> set[str]:
    """The processor's features as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}


def plain_config(config: PretrainedConfig) -> dict[str, Any]:
    """Return the config as plain JSON values, sizes under their usual names beside the family's own."""
    usual = {name: getattr(config, name, None) for name in config.attribute_map}
    return json.loads(json.dumps({**usual, **config.to_dict()}, default=str))


def weight_of(module: Any) -> Tensor:
    """Return a module's weight, fetched where device_map keeps it on the CPU or the disk until it is used."""
    weight = module.weight
    return module._hf_hook.weights_map["weight"] if weight.device.type == "meta" else weight


def _refuse_incomplete(target: str, report: Any) -> None:
    missing = sorted(_field(report, "missing_keys"))
    if missing:
        some = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise UserError(
            f"{target}: the checkpoint lacks {len(missing)} of the model's tensors ({some}); fetch it again"
        )
    if wrong := _field(report, "mismatched_keys"):
        raise UserError(
            f"{target}: tensors of another shape than the config says: {sorted(map(str, wrong))[:3]}"
        )


def _field(report: Any, name: str) -> Any:
    return (report.get(name) if isinstance(report, dict) else getattr(report, name, None)) or ()


def _say_spilled(model: PreTrainedModel) -> None:
    """Parts that device_map put on the disk, or on the CPU beside a GPU, make everything slow: say so."""
    places = [str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()]
    slow = {"disk"} if set(places) <= {"cpu", "disk"} else {"cpu", "disk"}
    if spilled := [f"{places.count(place)} on the {place}" for place in sorted(slow & set(places))]:
        print(
            f"note: of the target's {len(places)} parts device_map put {' and '.join(spilled)}: every "
            "forward waits for them; use a smaller --dtype or more devices",
            file=sys.stderr,
        )


@contextlib.contextmanager
def explained(target: str) -> Iterator[None]:
    """Turn what loading can raise into one sentence."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    with hub.asked_once(target) as silent:
        try:
            yield
        except SafetensorError as error:
            raise UserError(f"{target}: a weight file is damaged ({error}); fetch it again") from error
        except StrictDataclassError as error:
            raise UserError(f"{target}: config.json: {error}; correct it, or fetch it again") from error
        except ODD as error:
            why = _first_line(error)
            if silent is None and hub.is_kept_offline(error):
                silent = hub.KEPT_OFFLINE
            if silent:
                why = f"no such directory here, and {silent}; give a hub id, a directory or a .gguf file"
            raise UserError(f"{target}: could not be loaded as a causal language model: {why}") from error


@contextlib.contextmanager
def _value_named(target: str, config: PretrainedConfig) -> Iterator[None]:
    """Name the key whose value transformers looked up in vain, of which it says the value alone."""
    try:
        yield
    except KeyError as error:
        for key, value in config.get_text_config().to_dict().items():
            if isinstance(value, str) and error.args == (value,):
                raise UserError(
                    f"{target}: config.json: {key}: got {value!r}, wanted a name that transformers knows; "
                    "correct it, or fetch it again"
                ) from error
        raise


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' bars and warnings off the terminal while loading."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
