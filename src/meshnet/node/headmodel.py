"""What a head knows of a model beyond its layers: tokenizer, chat template, how requests become prompts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshnet.engine.base import EngineError, SamplingParams, Tokens
from meshnet.engine.template import ChatTemplate, TemplateError
from meshnet.engine.tokenizer import Tokenizer
from meshnet.models.gguf import ModelFile
from meshnet.node.call import Prompt
from meshnet.protocol import membership_pb2 as pb
from meshnet.protocol.calls import GenerateCall
from meshnet.protocol.errors import ApiError
from meshnet.protocol.grammar import GrammarSpec, grammar_for
from meshnet.protocol.openai import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    chat_from_request,
    check_tools,
    completion_from_request,
)
from meshnet.protocol.tools import ToolFormat, detect_tool_format


class HeadModel:
    """Immutable once made; `prompt` may run on any thread."""

    def __init__(
        self, model_id: str, model: ModelFile, aliases: Iterable[str] = (), *, file: Path | None = None
    ) -> None:
        """`file` holds the vocabulary: a head's, where the whole model is not on this machine."""
        self.model_id = model_id
        self.names = frozenset((model_id, *aliases))
        self.model = model
        self.tokenizer = Tokenizer(file or model.path)
        source = model.chat_template
        self._template = None if source is None else ChatTemplate(source, self.tokenizer)
        self.tool_format: ToolFormat | None = detect_tool_format(source) if source else None

    @property
    def has_tools(self) -> bool:
        """Whether chats with tools are possible: the template shows them, and calls can be read back."""
        return self._template is not None and self._template.has_tools and self.tool_format is not None

    def card(self) -> pb.ModelCard:
        """What the tracker tells clients."""
        return pb.ModelCard(
            name=self.model.metadata.text("general.name") or self.model.name,
            chat_template=self.model.chat_template or "",
            tools=self.has_tools,
            n_ctx_train=self.model.n_ctx_train,
            n_vocab=self.tokenizer.n_vocab,
            quantisation=self.model.quantisation,
            bytes=self.model.n_bytes,
        )

    def prompt(self, request: GenerateCall) -> Prompt:
        """A request's tokens and sampling. Raises ApiError for what the client can change."""
        try:
            body: GenerationRequest
            if request.kind == "chat":
                chat = chat_from_request(request.request)
                tokens, spec, body = self._chat(chat), grammar_for(chat, self.tool_format), chat
            elif request.kind == "completion":
                completion = completion_from_request(request.request)
                tokens, spec, body = self._completion(completion), GrammarSpec(), completion
            else:
                raise ApiError(400, f"kind is {request.kind[:40]!r}; chat and completion are possible")
        except msgspec.ValidationError as error:
            raise ApiError(400, f"the request cannot be read: {error}") from error
        if not len(tokens):
            raise ApiError(400, "The prompt is empty; send at least one token.", param="prompt")
        self._check_bias(body)
        grammar: Any = request.request.get("grammar", spec.gbnf)
        sampling = SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            seed=request.seed,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repeat_penalty=body.repeat_penalty,
            logit_bias=body.logit_bias,
            grammar=str(grammar),
            logprobs=body.logprobs,
            prompt_tokens=len(tokens),
        )
        return Prompt(tokens, sampling, body.stop, body.n, spec.show_control)

    def _chat(self, request: ChatRequest) -> Tokens:
        if self._template is None:
            raise ApiError(
                400,
                f"Model '{request.model}' has no chat template; use /v1/completions.",
                code="unsupported_parameter",
                param="messages",
            )
        check_tools(request, self.has_tools)
        try:
            text = self._template.render(request.template_messages(), tools=request.template_tools())
            return self.tokenizer.encode(text)
        except (TemplateError, EngineError) as error:
            raise ApiError(
                400, f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _check_bias(self, body: GenerationRequest) -> None:
        """The tail would refuse such a bias too, but there it would look like the node's fault."""
        for token, _ in body.logit_bias:
            if token >= self.tokenizer.n_vocab:
                had = self.tokenizer.n_vocab
                raise ApiError(
                    400,
                    f"Invalid 'logit_bias': token {token} is not one of the model's {had}.",
                    param=f"logit_bias.{token}",
                )

    def _completion(self, request: CompletionRequest) -> Tokens:
        if not isinstance(request.prompt, str):
            beyond = next((token for token in request.prompt if token >= self.tokenizer.n_vocab), None)
            if beyond is not None:
                raise ApiError(
                    400,
                    f"Invalid 'prompt': token {beyond} is not one of the model's {self.tokenizer.n_vocab}.",
                    param="prompt",
                )
            return np.asarray(request.prompt, dtype=np.int32)
        try:
            return self.tokenizer.encode(request.prompt)
        except EngineError as error:
            raise ApiError(400, f"Invalid 'prompt': {error}.", param="prompt") from error

    def close(self) -> None:
        """Frees the vocabulary."""
        self.tokenizer.close()
