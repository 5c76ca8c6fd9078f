"""The libraries whose models :mod:`watch_coverage` checks: tiny models of each, and inputs that they accept."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import tiny_models
import torch
from tiny_inputs import InputBuilder, Inputs
from torch import Tensor, nn
from torchvision_stub import define_missing_operators

define_missing_operators()  # before a library imports torchvision

MAX_PARAMETERS = 60_000_000
SEARCH_SECONDS = 20.0  # after which no further models and inputs are tried


@dataclass
class TinyModel:
    """A model of a case, with inputs that it accepts."""

    model: nn.Module
    inputs: Mapping[str, Any]
    title: str  # its class or name


class Library(Protocol):
    """A library of models."""

    name: str  # of the package
    plural: str  # what its cases are
    quick_cases: tuple[str, ...]

    def list_cases(self) -> list[str]:
        """List what is checked."""

    def find_model(self, case: str, errors: list[str]) -> TinyModel | None:
        """Return a model, or None after the errors of all inputs.

        Raises:
            RuntimeError: None could be built.
        """

    def list_implementations(self, model: nn.Module) -> list[tuple[str, Callable[[], Any]]]:
        """List the implementations of attention of a model, and what selects them."""


def call_model(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run the model on a copy of the inputs, with the same random numbers each time."""
    torch.manual_seed(3)
    with torch.no_grad():
        return model(**{name: _copy_tensors(x) for name, x in inputs.items()})


def _copy_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_copy_tensors(x) for x in value] if isinstance(value, list) else value


def do_nothing() -> None:
    """Select the only implementation."""


# --------------------------------------------------------------------------------------------- transformers


class Transformers:
    """All model types of transformers."""

    name, plural = "transformers", "model types"
    # The first two are right, the next two have attention without a map, the last one has none.
    quick_cases = ("bert", "bloom", "swiftformer", "yoso", "convnext")

    def list_cases(self) -> list[str]:
        return tiny_models.list_model_types()

    def find_model(self, case: str, errors: list[str]) -> TinyModel | None:
        try:
            found = self._find_whole_model(case, errors)
        except RuntimeError:
            if (part := self._find_part(case)) is not None:
                return part
            raise
        return found or self._find_part(case)

    def list_implementations(self, model: nn.Module) -> list[tuple[str, Callable[[], Any]]]:
        default = getattr(getattr(model, "config", None), "_attn_implementation", None) or "eager"
        if not hasattr(model, "set_attn_implementation"):  # a part of a model
            return [(default, do_nothing)]
        names = dict.fromkeys(("eager", default))
        return [(name, functools.partial(model.set_attn_implementation, name)) for name in names]

    def _find_whole_model(self, case: str, errors: list[str]) -> TinyModel | None:
        """Return a model with inputs: if possible, all that it takes."""
        partial: TinyModel | None = None
        deadline = time.monotonic() + SEARCH_SECONDS
        for model in tiny_models.build_models(case):
            builder = InputBuilder(model, case, deadline)
            for is_partial in (False, True) if partial is None else (False,):
                inputs = builder.find_inputs(functools.partial(call_model, model), errors, is_partial)
                if inputs is not None and not is_partial:
                    return TinyModel(model, inputs, type(model).__name__)
                if inputs is not None:
                    partial = TinyModel(model, inputs, type(model).__name__)
            if time.monotonic() > deadline:
                break
        return partial

    def _find_part(self, case: str) -> TinyModel | None:
        """Return a part of a model of another type, with the inputs that it has there."""
        for parent_type in tiny_models.list_parents(case):
            with suppress(RuntimeError):
                parent = self._find_whole_model(parent_type, [])
                part = None if parent is None else tiny_models.find_part(parent.model, case)
                if parent is None or part is None:
                    continue
                with record_arguments(part) as calls:
                    call_model(parent.model, parent.inputs)
                if calls:
                    return TinyModel(part, calls[0], f"{type(part).__name__} of {parent.title}")
        return None


@contextmanager
def record_arguments(module: nn.Module) -> Iterator[list[Mapping[str, Any]]]:
    """Record the arguments of each call of a module."""
    signature = inspect.signature(module.forward)
    calls: list[Mapping[str, Any]] = []

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        extra = next((x.name for x in signature.parameters.values() if x.kind is x.VAR_KEYWORD), "")
        calls.append({**{k: v for k, v in arguments.items() if k != extra}, **arguments.get(extra, {})})

    handle = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


# ----------------------------------------------------------------------------------------------------- timm


class Timm:
    """Every family of timm: the smallest model of each of its modules."""

    name, plural = "timm", "families"
    quick_cases = ("vision_transformer", "levit")
    SIZE_WORDS = (
        "test",
        "zepto",
        "atto",
        "femto",
        "pico",
        "nano",
        "xxtiny",
        "xtiny",
        "tiny",
        "xxs",
        "xs",
        "t0",
        "small",
    )
    NUM_NAMES = 6  # that are tried
    OPTIONS: tuple[dict[str, Any], ...] = (
        {"img_size": 64},
        {"img_size": 128},
        {"img_size": 64, "depth": 2},
        {"img_size": 128, "depth": 2},
        {"depth": 2},
        {},
    )

    def list_cases(self) -> list[str]:
        import timm

        return timm.list_modules()

    def find_model(self, case: str, errors: list[str]) -> TinyModel | None:
        import timm

        reasons = []
        is_built = False
        for name in sorted(timm.list_models(module=case), key=self._rank)[: self.NUM_NAMES]:
            for options in self.OPTIONS:
                try:
                    model = build_with_limit(functools.partial(timm.create_model, name, **options))
                except Exception as error:
                    reasons.append(f"{name}: {type(error).__name__}: {error}")
                    continue
                is_built = True
                size = options.get("img_size") or model.default_cfg["input_size"][-1]
                channels = model.default_cfg["input_size"][0]
                image = torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))
                inputs = {next(iter(inspect.signature(model.forward).parameters)): image}
                try:
                    call_model(model, inputs)
                    return TinyModel(model, inputs, name)
                except Exception as error:
                    errors.append(f"{name}: {type(error).__name__}: {error}")
        if not is_built:
            raise RuntimeError(reasons[0] if reasons else "it has no models")
        return None

    def list_implementations(self, model: nn.Module) -> list[tuple[str, Callable[[], Any]]]:
        modules = [module for module in model.modules() if hasattr(module, "fused_attn")]

        def select(is_fused: bool) -> None:
            for module in modules:
                module.fused_attn = is_fused

        if not modules:
            return [("default", do_nothing)]
        return [("eager", functools.partial(select, False)), ("fused", functools.partial(select, True))]

    def _rank(self, name: str) -> tuple[int, int, str]:
        words = name.split("_")
        size = next((n for n, word in enumerate(self.SIZE_WORDS) if word in words), len(self.SIZE_WORDS))
        numbers = [int(x) for x in re.findall(r"(?<=_)\d{3,4}(?=_|$)", name)]
        return size, max(numbers, default=224), name


def build_with_limit(build: Callable[[], nn.Module], limit: int = MAX_PARAMETERS) -> nn.Module:
    """Build a model in evaluation mode, unless it has too many parameters."""
    with suppress(NotImplementedError), torch.device("meta"):
        draft = build()
        num_parameters = sum(x.numel() for x in draft.parameters())
        if num_parameters > limit:
            raise RuntimeError(f"it has {num_parameters:,} parameters, more than {limit:,}")
    torch.manual_seed(0)
    return build().eval()


# ------------------------------------------------------------------------------------------------ diffusers


class Diffusers:
    """Every model class of diffusers."""

    name, plural = "diffusers", "classes"
    quick_cases = ("DiTTransformer2DModel",)
    SIZES = (
        (r"layers|num_.*blocks|^depth$|_depth$|transformer_layers_per_block|num_layers_per_block", 1),
        (r"num_(attention_|kv_|key_value_|refiner_)?heads|num_kv_heads|n_heads", 2),
        (r"vocab_size|num_embeds_ada_norm|num_vq_embeddings|num_train_timesteps", 100),
        (r"sample_size|sample_height|sample_width|image_size|latent_size", 16),
        (r"sample_frames|num_frames", 5),
    )
    TEXT_WIDTHS = r"cross_attention_dim|joint_attention_dim|caption_channels|text_(embed_)?dim|text_feat|pooled_proj"

    def list_cases(self) -> list[str]:
        import diffusers

        classes = {name: getattr(diffusers, name) for name in diffusers._import_structure["models"]}
        return [
            name
            for name, x in classes.items()
            if inspect.isclass(x) and issubclass(x, diffusers.ModelMixin) and x is not diffusers.ModelMixin
        ]

    def find_model(self, case: str, errors: list[str]) -> TinyModel | None:
        import diffusers

        model_class = getattr(diffusers, case)
        reasons = []
        is_built = False
        deadline = time.monotonic() + SEARCH_SECONDS
        for level in ("depth and heads", "texts", "channels", "depth", "default"):
            try:
                model = build_with_limit(functools.partial(model_class, **self.shrink(model_class, level)), 120_000_000)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            is_built = True
            builder = DiffusionInputBuilder(model, case, deadline)
            inputs = builder.find_inputs(functools.partial(call_model, model), errors, False)
            if inputs is not None:
                return TinyModel(model, inputs, case)
            if time.monotonic() > deadline:
                break
        if not is_built:
            raise RuntimeError(reasons[0])
        return None

    def shrink(self, model_class: type, level: str) -> dict[str, Any]:
        """Return small values of the arguments of a class."""
        small: dict[str, Any] = {}
        parameters = inspect.signature(model_class.__init__).parameters
        for name, parameter in parameters.items():
            value = parameter.default
            size = next((size for pattern, size in self.SIZES if re.search(pattern, name)), None)
            if level == "default" or type(value) is bool or value is parameter.empty:
                continue
            if level == "depth" and not re.search(self.SIZES[0][0], name):
                continue
            if isinstance(value, int) and size is not None and value > 0:
                small[name] = min(value, size)
            elif isinstance(value, int) and level == "texts" and re.search(self.TEXT_WIDTHS, name):
                small[name] = 32
            elif isinstance(value, list | tuple) and value and all(type(x) is int for x in value):
                if re.search(r"channels", name) and max(value) > 64:
                    small[name] = type(value)(32 * min(n + 1, 2) for n in range(len(value)))
                elif re.search(self.SIZES[0][0], name):
                    small[name] = type(value)(1 for _ in value)
            elif (
                level == "channels" and isinstance(value, int) and re.search(r"hidden_(size|dim)|^dim$|inner_dim", name)
            ):
                small[name] = 64
        if "caption_projection_dim" in parameters and "num_attention_heads" in small:
            small["caption_projection_dim"] = small["num_attention_heads"] * parameters["attention_head_dim"].default
        return small

    def list_implementations(self, model: nn.Module) -> list[tuple[str, Callable[[], Any]]]:
        from diffusers.models import attention_processor

        processors = getattr(model, "attn_processors", None) or {}
        implementations: list[tuple[str, Callable[[], Any]]] = [("default", do_nothing)]
        if processors and {type(x).__name__ for x in processors.values()} == {"AttnProcessor2_0"}:
            eager = functools.partial(model.set_attn_processor, attention_processor.AttnProcessor())
            default = functools.partial(model.set_attn_processor, attention_processor.AttnProcessor2_0())
            implementations = [("eager", eager), ("default", default)]
        return implementations


class DiffusionInputBuilder(InputBuilder):
    """Inputs of diffusion models: noisy samples, time steps and embeddings of texts."""

    WIDTHS: ClassVar[dict[str, tuple[str, ...]]] = {
        "encoder_hidden_states": ("joint_attention_dim", "caption_channels", "cross_attention_dim", "text_dim"),
        "pooled_projections": ("pooled_projection_dim",),
    }

    def list_inputs(self) -> Iterator[Inputs]:
        first = next(iter(self.parameters))
        channels = self.find_setting("in_channels", "in_dim", "num_channels", "latent_channels") or 4
        if first in ("x", "z") or (first == "sample" and "timestep" not in self.parameters):
            channels = self.find_setting("in_channels", "latent_channels") or 3
        for shape in (
            (channels, 16, 16),
            (channels, 5, 16, 16),
            (5, channels, 16, 16),
            (16, channels),
            (channels, 16),
            (channels, 1, 16, 16),
            (channels, 9, 16, 16),
            (channels, 512),
        ):
            sample = self.draw(2, *shape)
            required = {name: self.build_value(name, {first: sample}) for name in self.required if name != first}
            text = {x: self.build_value(x) for x in ("encoder_hidden_states", "timestep") if x in self.parameters}
            yield {first: sample, **required, **text}

    def _build_named_value(self, name: str, inputs: Mapping[str, Any]) -> Any:
        sample = next((x for x in inputs.values() if isinstance(x, Tensor) and x.is_floating_point()), None)
        length = math.prod(sample.shape[1:-1]) if sample is not None and sample.dim() == 3 else 16
        axes = getattr(self.config, "axes_dims_rope", None) or getattr(self.config, "axes_dim", None) or (0, 0, 0)
        if name in ("timestep", "timesteps", "t"):
            return (
                torch.tensor([3.0, 3.0]) if "float" in str(self.parameters[name].annotation) else torch.tensor([3, 3])
            )
        if name in ("guidance", "time_ids", "fps"):
            return torch.tensor([2.0, 2.0])
        if name in ("img_ids", "txt_ids"):
            return torch.zeros(length if name == "img_ids" else 7, len(axes))
        if name == "img_shapes":
            return [[(1, 4, 4)]] * 2
        if name in ("added_time_ids",):
            return torch.zeros(2, 3)
        if name in ("txt_seq_lens", "encoder_seq_lengths", "text_lens"):
            return [7, 7]
        if name in ("num_frames", "height", "width", "frames"):
            return {"num_frames": 1, "frames": 1}.get(name, 4)
        if name in ("class_labels", "class_label"):
            return torch.tensor([1, 2])
        if name in ("controlnet_cond",):
            return self.draw(2, 3, 128, 128)
        if name in ("conditioning_scale",):
            return 1.0
        if re.search(r"encoder_.*mask|text.*mask|^mask$|attention_mask", name):
            return torch.ones(2, 7, dtype=torch.bool)
        if re.search(r"encoder_hidden_states|prompt_embeds|text_embeds|context|caption", name):
            names = self.WIDTHS["encoder_hidden_states"]
            return self.draw(2, 7, self.find_setting(*names) or 32)
        if re.search(r"pooled", name):
            return self.draw(2, self.find_setting(*self.WIDTHS["pooled_projections"]) or 32)
        return None


# ------------------------------------------------------------------------------------------- x-transformers


class XTransformers:
    """The options of x-transformers, each in a decoder, or in an encoder and a decoder with cross-attention."""

    name, plural = "x-transformers", "options"
    quick_cases = ("default", "attn_flash")
    # Of the attention layers. Cases are named after them; what they need besides comes second.
    OPTIONS: ClassVar[dict[str, dict[str, Any]]] = {
        "default": {},
        "attn_flash": {"attn_flash": True},
        **{
            name: {name: True}
            for name in (
                "alibi_pos_bias",
                "rel_pos_bias",
                "dynamic_pos_bias",
                "rotary_pos_emb",
                "polar_pos_emb",
                "residual_attn",
                "attn_qk_norm",
                "attn_qk_rmsnorm",
                "attn_value_rmsnorm",
                "attn_pre_talking_heads",
                "attn_post_talking_heads",
                "attn_pre_scale_post_talking_heads",
                "attn_head_scale",
                "attn_on_attn",
                "attn_gate_values",
                "attn_gate_value_heads",
                "attn_swiglu_values",
                "attn_hard",
                "attn_l2_distance",
                "attn_sigmoid",
                "attn_gumbel_softmax",
                "attn_selective",
                "attn_cog_signed",
                "attn_one_kv_head",
                "attn_add_zero_kv",
                "attn_head_learned_sink",
                "attn_data_dependent_alibi",
                "attn_use_rel_proj_pos_bias",
                "attn_use_cope",
                "attn_softclamp_logits",
                "attn_orthog_projected_values",
                "attn_laser",
                "attn_inverted_attention",
                "attn_qk_norm_dim_scale",
                "macaron",
                "unet_skips",
            )
        },
        "rotary_xpos": {"rotary_pos_emb": True, "rotary_xpos": True},
        "attn_sparse_topk": {"attn_sparse_topk": 3},
        "attn_sparse_topk_straight_through": {"attn_sparse_topk": 3, "attn_sparse_topk_straight_through": True},
        "attn_num_mem_kv": {"attn_num_mem_kv": 3},
        "attn_max_attend_past": {"attn_max_attend_past": 2},
        "attn_kv_heads": {"attn_kv_heads": 2},
        "attn_value_dim_head": {"attn_value_dim_head": 12},
        "attn_qk_norm_groups": {"attn_qk_norm": True, "attn_qk_norm_groups": 2, "attn_dim_head": 32},
        "attn_latent": {
            "attn_use_latent_q": True,
            "attn_dim_latent_q": 16,
            "attn_use_latent_kv": True,
            "attn_dim_latent_kv": 16,
        },
        "attn_add_zero_kv, residual_attn": {"attn_add_zero_kv": True, "residual_attn": True},
        "add_value_residual": {"add_value_residual": True},
        "shift_tokens": {"shift_tokens": 1},
        "num_residual_streams": {"num_residual_streams": 2},
        "attn_dropout": {"attn_dropout": 0.1},
    }
    # These also have a fused form.
    FLASH = (
        "alibi_pos_bias",
        "rotary_pos_emb",
        "attn_qk_norm",
        "attn_num_mem_kv",
        "attn_add_zero_kv",
        "attn_max_attend_past",
        "attn_one_kv_head",
        "attn_kv_heads",
        "attn_gate_values",
        "attn_value_dim_head",
        "attn_laser",
        "attn_data_dependent_alibi",
    )
    WRAPPED = (
        "memory tokens",
        "causal mask and padding",
        "encoder",
        "encoder, attn_flash",
        "cross-attention",
        "cross-attention, attn_flash",
        "prefix",
        "vision",
        "continuous",
        "class token",
        "attention pooling",
    )

    def list_cases(self) -> list[str]:
        return [*self.OPTIONS, *(f"{x}, attn_flash" for x in self.FLASH), *self.WRAPPED]

    def list_implementations(self, model: nn.Module) -> list[tuple[str, Callable[[], Any]]]:
        return [("default", do_nothing)]

    def find_model(self, case: str, errors: list[str]) -> TinyModel | None:
        torch.manual_seed(0)
        model, inputs = self._build(case)
        return TinyModel(model.eval(), inputs, type(model).__name__)

    def _build(self, case: str) -> tuple[nn.Module, Inputs]:
        import x_transformers as x

        sizes: dict[str, Any] = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}
        texts = {"num_tokens": 50, "max_seq_len": 16}
        ids, mask = torch.randint(0, 50, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
        mask[1, 5:] = False
        base = case.partition(", attn_flash")[0]
        sizes |= {"attn_flash": True} if ", attn_flash" in case else {}
        if case in self.OPTIONS or base in self.OPTIONS:
            options = self.OPTIONS.get(case) or self.OPTIONS[base]
            return x.TransformerWrapper(**texts, attn_layers=x.Decoder(**(sizes | options))), {"x": ids}
        if base == "memory tokens":
            return x.TransformerWrapper(**texts, num_memory_tokens=3, attn_layers=x.Decoder(**sizes)), {"x": ids}
        if base == "causal mask and padding":
            return x.TransformerWrapper(**texts, attn_layers=x.Decoder(**sizes)), {"x": ids, "mask": mask}
        if base == "encoder":
            return x.TransformerWrapper(**texts, attn_layers=x.Encoder(**sizes)), {"x": ids, "mask": mask}
        if base == "cross-attention":
            model = x.TransformerWrapper(**texts, attn_layers=x.Decoder(**sizes, cross_attend=True))
            return model, {"x": ids, "context": torch.randn(2, 9, 32), "context_mask": torch.ones(2, 9).bool()}
        if base == "prefix":
            model = x.TransformerWrapper(**texts, attn_layers=x.PrefixDecoder(**sizes))
            return model, {"x": ids, "prefix_attn_len": 3}
        if base == "vision":
            encoder = x.Encoder(**sizes)
            model = x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=3, attn_layers=encoder)
            return model, {"img": torch.randn(2, 3, 32, 32)}
        if base == "continuous":
            layers = x.Decoder(**sizes)
            model = x.ContinuousTransformerWrapper(dim_in=5, dim_out=5, max_seq_len=16, attn_layers=layers)
            return model, {"x": torch.randn(2, 7, 5)}
        if base == "class token":
            model = x.TransformerWrapper(**texts, use_cls_token=True, attn_layers=x.Encoder(**sizes))
            return model, {"x": ids, "mask": mask}
        model = x.TransformerWrapper(**texts, attn_pool=True, attn_layers=x.Encoder(**sizes))
        return model, {"x": ids, "mask": mask}


LIBRARIES: dict[str, Library] = {x.name: x for x in (Transformers(), Timm(), Diffusers(), XTransformers())}


def list_installed() -> list[str]:
    """Return the names of the libraries that are installed."""
    names = []
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            names.append(name)
    return names
