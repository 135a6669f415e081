"""Prompts become ids once: one BOS where there is one, and never zero tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvrelay import BundleError, Pipeline, PromptError
from kvrelay.bundle import Bundle, open_bundle
from kvrelay.drafts import draft_entry
from kvrelay.tokenizer import Tokenizer, first_difference
from rig import PROMPT, assert_same, engine_drafter, plain, with_drafter
from tiny import byte_tokenizer
from tokenizers import processors


@pytest.fixture(scope="module")
def bundle(llama_bundle: Path) -> Bundle:
    return open_bundle(llama_bundle)


def tokenizer(bundle: Bundle, folder: Path, *, adds_bos: bool, template: str | None = None) -> Tokenizer:
    """The bundle's tokenizer, in a folder of its own, with or without a BOS that it adds."""
    backend = byte_tokenizer().backend_tokenizer
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    default = "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}<|assistant|>"
    (folder / "chat_template.jinja").write_text(template or default, encoding="utf-8")
    return Tokenizer(replace(bundle, path=folder))


def test_a_tokenizer_that_adds_a_bos_gives_one_and_only_one(bundle: Bundle, tmp_path: Path) -> None:
    with_bos = tokenizer(bundle, tmp_path, adds_bos=True)
    plain_ids = with_bos.encode("hello")
    assert plain_ids[0] == 0
    assert plain_ids.count(0) == 1
    assert with_bos.encode("<s>hello") == plain_ids
    assert with_bos.encode([{"role": "user", "content": "hello"}]).count(0) == 1
    assert with_bos.encode(plain_ids) == plain_ids, "ids are taken as they are"


def test_a_tokenizer_that_adds_no_bos_gives_none(bundle: Bundle, tmp_path: Path) -> None:
    without = tokenizer(bundle, tmp_path, adds_bos=False)
    assert 0 not in without.encode("hello")
    assert without.encode("<s>hello") == [0, *without.encode("hello")]
    assert without.encode([{"role": "user", "content": "hello"}]).count(0) == 1


@pytest.mark.parametrize("empty", ["", []])
def test_an_empty_prompt_is_the_bos_or_a_clear_error(bundle: Bundle, tmp_path: Path, empty: Any) -> None:
    assert tokenizer(bundle, tmp_path, adds_bos=True).encode(empty) == [0]
    with pytest.raises(PromptError, match="the prompt has no tokens"):
        tokenizer(bundle, tmp_path, adds_bos=False).encode(empty)


def test_an_empty_prompt_never_reaches_an_engine(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)
    for empty in ("", []):
        with pytest.raises(PromptError, match="give at least one token"):
            pipe.stream(empty)


@pytest.mark.parametrize("prompt", ["Good day", [{"role": "user", "content": "Good day"}], [5]])
def test_draft_and_target_are_fed_the_same_ids(llama_bundle: Path, prompt: Any) -> None:
    pipe = Pipeline(llama_bundle, draft="self", window=4)
    drafter = engine_drafter(pipe, draft_entry(pipe._bundle, pipe.precision, "cousin"), own_cache=True)
    with_drafter(pipe, drafter)
    fed: dict[int, int] = {}
    feed = drafter._feed

    def watched(width: int, part: Any, position: int) -> Any:
        fed.update(enumerate(part, position))
        return feed(width, part, position)

    drafter._feed = watched  # type: ignore[method-assign]
    result = pipe.generate(prompt, max_new_tokens=3)
    ids = pipe._intake.tokenizer.encode(prompt)
    assert fed == dict(enumerate([*ids, result.token_ids[0]]))
    assert_same(result, plain(llama_bundle).generate(prompt, max_new_tokens=3))


def test_a_chat_is_put_through_the_template(llama_bundle: Path) -> None:
    encoder = plain(llama_bundle)._intake.tokenizer
    ids = encoder.encode([{"role": "user", "content": "hi"}])
    assert ids == encoder.encode("<|user|>hi\n<|assistant|>")
    assert (ids[0], ids[-1]) == (2, 3)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([-1], r"prompt\[0\] is -1: token ids go from 0 to 259"),
        ([5, 260], r"prompt\[1\] is 260"),
        ([5, 319], r"prompt\[1\] is 319"),
        ([5, 1.5], r"prompt\[1\] is 1.5: a prompt is text, chat messages, or a list of token ids"),
        ([[5]], r"prompt\[0\] is \[5\]"),
        ([True], r"prompt\[0\] is True"),
        ([{"role": "user"}], r"messages\[0\] needs"),
        ([{"content": "x"}], r"messages\[0\] needs"),
        ([{"role": "user", "content": "x"}, "y"], r"messages\[1\] needs"),
        ([{"role": "user", "content": None}], r"messages\[0\] needs .* both text"),
        ([{"role": "user", "content": "a\ud800"}], r"character 9 of the prompt, '\\ud800', is half of one"),
        ("ab\udcff", r"character 2 of the prompt, '\\udcff', is half of one"),
        (np.array(5), "the prompt is array"),
    ],
)
def test_a_prompt_that_is_none_is_refused_with_its_place(llama_bundle: Path, prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        plain(llama_bundle).stream(prompt)


@pytest.mark.parametrize("prompt", [None, 5, b"abc", {"role": "user", "content": "x"}])
def test_a_prompt_of_another_type_is_refused(llama_bundle: Path, prompt: Any) -> None:
    with pytest.raises(PromptError):
        plain(llama_bundle).stream(prompt)


def test_a_template_that_raises_says_why(bundle: Bundle, tmp_path: Path) -> None:
    refusing = tokenizer(bundle, tmp_path, adds_bos=False, template="{{ raise_exception('only two roles') }}")
    with pytest.raises(PromptError, match="only two roles"):
        refusing.encode([{"role": "user", "content": "x"}])


def test_a_template_that_fails_in_python_is_one_clear_error(bundle: Bundle, tmp_path: Path) -> None:
    failing = tokenizer(bundle, tmp_path, adds_bos=False, template="{{ messages[0]['content'] + 1 }}")
    with pytest.raises(PromptError, match="the chat template refuses these messages: can only concatenate"):
        failing.encode([{"role": "user", "content": "x"}])


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0]['content'] }}{{ eos_token }}", "hi</s>"),
        ("{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}!", "!"),
        ("{{ {'b': '\u00e9', 'a': 1} | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}", "A"),
        ("{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}.", "hi."),
    ],
)
def test_a_template_has_what_hugging_face_gives_it(bundle: Bundle, tmp_path: Path, template: str, text: str) -> None:
    own = tokenizer(bundle, tmp_path, adds_bos=False, template=template)
    assert own.render(HI) == (text if text != "A" else '{"a":1,"b":"\\u00e9"}')


def test_a_template_means_the_tokenizers_own_end_of_several(bundle: Bundle, tmp_path: Path) -> None:
    generation = bundle.manifest.generation.model_copy(update={"eos_ids": [1, 3], "eos_id": 3})
    several = replace(bundle, manifest=bundle.manifest.model_copy(update={"generation": generation}))
    assert tokenizer(several, tmp_path, adds_bos=False, template="{{ eos_token }}").render(HI) == "<|assistant|>"


def test_a_template_cannot_reach_the_machine(bundle: Bundle, tmp_path: Path) -> None:
    reaching = tokenizer(bundle, tmp_path, adds_bos=False, template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(PromptError):
        reaching.encode([{"role": "user", "content": "x"}])


def test_a_broken_tokenizer_file_is_one_clear_error(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(replace(bundle, path=tmp_path))


def test_tokenizers_are_compared_by_what_every_id_means() -> None:
    one, other = byte_tokenizer(), byte_tokenizer()
    assert first_difference(one.backend_tokenizer.to_str(), other.backend_tokenizer.to_str()) is None
    other.add_tokens(["<extra>"])
    difference = first_difference(one.backend_tokenizer.to_str(), other.backend_tokenizer.to_str())
    assert difference is not None
    assert "260 tokens in the target, 261 in the draft" in difference
    assert "id 260: None and '<extra>'" in difference


def test_ids_that_are_numpy_integers_are_ids(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)
    wanted = pipe.generate(PROMPT, max_new_tokens=4)
    for kind in (np.int32, np.int64, np.uint8):
        assert_same(pipe.generate(np.array(PROMPT, kind), max_new_tokens=4), wanted)
