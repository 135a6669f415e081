"""Text to ids and chat messages to text."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _Backend

from .bundle import Bundle
from .errors import BundleError, PromptError

__all__ = ["Message", "Prompt", "Tokenizer", "first_difference"]

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]

_MESSAGE_KEYS = ("role", "content")
_PROMPTS = "a prompt is text, chat messages, or a list of token ids"


class Tokenizer:
    """The tokenizer and chat template of a bundle.

    Raises:
        BundleError: the tokenizer file cannot be read.
    """

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        path = bundle.path / manifest.tokenizer.path
        try:
            # As text, not by name: the library's own file reader and Python may disagree on a path's encoding.
            self.backend = _Backend.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise BundleError(f"{path} cannot be read: {error}") from None
        self.bos_id = manifest.generation.bos_id
        self._eos_id = manifest.generation.eos_id
        self.vocab_size = bundle.target.vocab_size
        self._template: str | None = None
        if manifest.chat_template is not None:
            self._template = (bundle.path / manifest.chat_template.path).read_text(encoding="utf-8")

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt.

        Args:
            prompt: text, taken as it is (with BOS where the tokenizer adds one); chat messages, put through the chat
                template; or ids, checked only. The text of a special token becomes that token, in a message too: what
                comes from strangers may hold the end of their turn.

        Raises:
            PromptError: the prompt is empty and the tokenizer has no BOS, an id is outside the vocabulary, or the
                messages do not suit the template.
        """
        if isinstance(prompt, str):
            ids = self._encode(prompt, special=True)
            if len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
                del ids[0]  # the text brought its own BOS
        elif isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise PromptError(f"the prompt is of type {type(prompt).__name__}: {_PROMPTS}")
        else:
            try:
                items: list[Any] = list(prompt)
            except TypeError:  # a numpy array without axes
                raise PromptError(f"the prompt is {prompt!r}: {_PROMPTS}") from None
            if items and isinstance(items[0], Mapping):
                ids = self._encode(self.render(items), special=False)
            else:
                ids = self._checked(items)
        if not ids:
            if self.bos_id is None or not self._adds_bos():
                raise PromptError("the prompt has no tokens and this tokenizer adds no BOS: give at least one token")
            ids = [self.bos_id]
        return ids

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"character {error.start} of the prompt, {text[error.start]!r}, is half of one: the text was not UTF-8"
            ) from None
        ids: list[int] = self.backend.encode(text, add_special_tokens=special).ids
        return ids

    def _adds_bos(self) -> bool:
        return self.backend.encode("").ids[:1] == [self.bos_id]

    def _checked(self, prompt: Sequence[Any]) -> list[int]:
        ids = []
        for i, token in enumerate(prompt):
            try:
                value = operator.index(token)
            except TypeError:
                value = None
            if value is None or isinstance(token, bool):
                raise PromptError(f"prompt[{i}] is {token!r}: {_PROMPTS}")
            if not 0 <= value < self.vocab_size:
                raise PromptError(f"prompt[{i}] is {value}: token ids go from 0 to {self.vocab_size - 1}")
            ids.append(value)
        return ids

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat, ready for the assistant's answer.

        Raises:
            PromptError: the bundle has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise PromptError("this bundle has no chat template: give the prompt as text")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or any(not isinstance(message.get(k), str) for k in _MESSAGE_KEYS):
                raise PromptError(f"messages[{i}] needs a 'role' and a 'content', both text, got {message!r}")
        try:
            template = _environment().from_string(self._template)
            return template.render(
                messages=list(messages),
                tools=None,  # some templates ask whether these are none, not whether they are there
                documents=None,
                add_generation_prompt=True,
                bos_token=self._token(self.bos_id),
                eos_token=self._token(self._eos_id),
            )
        except Exception as error:  # a template runs code: besides its own TemplateError it raises what Python does
            raise PromptError(f"the chat template refuses these messages: {error}") from None

    def _token(self, token_id: int | None) -> str:
        return (self.backend.id_to_token(token_id) or "") if token_id is not None else ""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens."""
        return self.backend.decode(ids, skip_special_tokens=True)


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks the assistant's words for training; here they are words like any."""

    tags = {"generation"}  # noqa: RUF012 -- as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The jinja2 set-up that chat templates are written for (Hugging Face's)."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def first_difference(target: str, draft: str) -> str | None:
    """Compare two tokenizers, given as their JSON.

    Returns:
        None if every id means the same token in both, else a description with both sizes and the first difference.
    """
    sides = [_Backend.from_str(text).get_vocab(with_added_tokens=True) for text in (target, draft)]
    by_id = [{i: token for token, i in side.items()} for side in sides]
    sizes = f"{len(by_id[0])} tokens in the target, {len(by_id[1])} in the draft"
    for i in range(max(max(ids, default=-1) for ids in by_id) + 1):
        a, b = by_id[0].get(i), by_id[1].get(i)
        if a != b:
            return f"{sizes}; they first differ at id {i}: {a!r} and {b!r}"
    return None
