"""What the management API takes, field by field; unknown fields are refused, and so is every wrong type."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from meshnet.protocol.errors import ApiError
from meshnet.protocol.refusals import translate
from meshnet.tracker.bodies import check_json, read_body

SMALL_BODY = 256 << 10
BODY_TIMEOUT_S = 30.0
MAX_TOKENS = 10**7
MAX_INVITE_S = 10 * 365 * 86_400

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Layer = Annotated[int, Meta(ge=0, le=65_535)]
Weight = Annotated[float, Meta(ge=0, le=1e9)]
CostName = Literal["measured", "weighted"]

MAX_SEQ = 10**15
"""The largest number of a console entry that is asked about."""


class Form(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all bodies."""


class SessionForm(Form):
    key: Annotated[str, Meta(max_length=4096)]


class DrainForm(Form):
    reason: Annotated[str, Meta(max_length=200)] = ""


class WeightsForm(Form):
    """Only what is named changes; see docs/routing.md."""

    latency: Weight | None = None
    load: Weight | None = None
    capacity: Weight | None = None
    hop: Weight | None = None
    prompt: Weight | None = None

    def named(self) -> dict[str, float]:
        """The weights that were given."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class RoutingForm(Form):
    cost_model: CostName | None = None
    weights: WeightsForm | None = None


class RoutingSettingsForm(Form):
    """`models` set to null by id forgets a model's own values."""

    default: RoutingForm | None = None
    models: dict[Name, RoutingForm | None] = {}


class PreviewForm(Form):
    """`model` left out: the default model. `layer_range` left out: all layers."""

    model: Name | None = None
    layer_range: tuple[Layer, Layer] | None = None
    prompt_tokens: Tokens = 0
    expected_tokens: Tokens = 256
    weights: WeightsForm | None = None
    cost_model: CostName | None = None
    alternatives: Annotated[int, Meta(ge=0, le=20)] = 3


class TicketForm(Form):
    """`nodes`: names or ids in order, as in X-Meshnet-Nodes; empty: the cheapest route."""

    model: Name | None = None
    nodes: Annotated[list[Name], Meta(max_length=64)] = []


class PlaceForm(Form):
    """`nodes` empty: all that take calls. `holders`: how many nodes should hold each layer."""

    model: Name | None = None
    nodes: Annotated[list[Name], Meta(max_length=10_000)] = []
    objective: Literal["throughput", "latency"] = "throughput"
    holders: Annotated[int, Meta(ge=1, le=64)] = 1


class LoadModelForm(Form):
    """A name, a path on the tracker's machine, or hf:ORG/REPO/FILE.gguf."""

    model: Annotated[str, Meta(min_length=1, max_length=1024)]


class DefaultModelForm(Form):
    """Left out: the first model that is complete."""

    model: Name | None = None


class AliasForm(Form):
    model: Name


class PlaceAgainForm(Form):
    """`model` left out: the default model."""

    model: Name | None = None


class InviteForm(Form):
    expires_s: Annotated[int, Meta(ge=1, le=MAX_INVITE_S)] = 86_400
    uses: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


F = TypeVar("F", bound=Form)
_decoders: dict[type[Form], msgspec.json.Decoder[Any]] = {}


async def read_form(request: Request, kind: type[F], *, needed: bool = False) -> F:
    """The body as a form; an empty one counts as `{}` unless it is needed. Raises ApiError."""
    body = await read_body(request.scope, request.receive, SMALL_BODY, BODY_TIMEOUT_S)
    if body:
        check_json(request.scope)
    elif needed:
        raise ApiError(400, "The request has no body; it must be a JSON object.", code="missing_body")
    else:
        body = b"{}"
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        form: F = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise translate(str(error), body) from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body is not JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None
    return form
