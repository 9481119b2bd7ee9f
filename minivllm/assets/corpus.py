"""The training text of the bundled checkpoint: CPython's own language reference, made to read as plain English.

vLLM 0.25.1: no counterpart
Articles: –

Every CPython carries the reference as `pydoc_data.topics`, so the text needs no network and no copy in the
repository. It differs a little between Python versions; the checkpoint's README names the one that was used.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"

_TYPOGRAPHY = str.maketrans(
    {"’": "'", "‘": "'", "“": '"', "”": '"', "—": "-", "–": "-", "…": "...", "\xa0": " "}
)
_UNDERLINE = re.compile(r"^[*=\-~^#]{3,}$")
_LIST_ITEM = re.compile(r"^(\* |[-•] |\d+\. |\[\d+\] )")
_CODE = re.compile(
    r"^\s*(>>>|\.\.\. |def |class |@\w|import |from \w+ import|return( .{1,30})?$|while .*:$|for .* in .*:$|if .*:$"
    r"|try:|with .*:$|print\(|#|[\w.\[\]]+(\(.*\))? = )",
    re.MULTILINE,
)
_NOISE = re.compile(
    r"^\s*(\+[-=]+\+|\|.*\||[=\-]{3,} +[=\-]{3,}|[=*\-]{20,}$|-\[ Footnotes \]-)", re.MULTILINE
)
# The reference writes literals as "name"; a quotation in prose is rare once the typographic quotes are gone.
_LITERAL = re.compile(r'"([^"\n]+)"')
_EMPHASIS = re.compile(r"(?<![\w*\"])\*{1,2}(\w[\w .:\-]{0,40})\*{1,2}(?![\w*\"])")


def _clean_prose(paragraph: str) -> str:
    text = " ".join(line.strip() for line in paragraph.splitlines())
    text = re.sub(
        r"(?<=\w)- (?=(?!and |or )[a-z])", "-", text
    )  # a compound word that was broken at its hyphen
    text = _EMPHASIS.sub(r"\1", text)
    text = _LITERAL.sub(r"\1", text.replace('""', '"'))
    text = re.sub(r"\s+\[\d+\](?=[\s.,;)]|$)", "", text)
    return re.sub(r" {2,}", " ", text).strip()


def _is_code(paragraph: str) -> bool:
    return paragraph.startswith("   ") and _CODE.search(paragraph) is not None


def _is_noise(paragraph: str) -> bool:
    """Blank, a rule, a grammar production or a table: none of them continues as readable English."""
    return "::=" in paragraph or _NOISE.search(paragraph) is not None or re.search(r"\w", paragraph) is None


def _split_list(paragraph: str) -> list[str]:
    """A paragraph whose lines start several list items, as one string per item."""
    items: list[str] = []
    for line in paragraph.splitlines():
        if items and not _LIST_ITEM.match(line.strip()):
            items[-1] += "\n" + line
        else:
            items.append(line)
    return items


def _clean_section(lines: list[str]) -> str:
    paragraphs: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        if _is_noise(block):
            continue
        if _is_code(block):
            paragraphs.append("\n".join(line.rstrip()[3:] for line in block.splitlines()))
        elif _LIST_ITEM.match(block.strip()):
            paragraphs.append("\n".join(_clean_prose(item) for item in _split_list(block)))
        else:
            paragraphs.append(_clean_prose(block))
    return "\n\n".join(paragraphs)


def documents() -> list[str]:
    """The sections of the reference, cleaned, without repeats, in the reference's order.

    A section is a title and the text up to the next title. Topics overlap ("if" is also part of "compound");
    each section is kept once.
    """
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for name in sorted(topics):
        lines = topics[name].translate(_TYPOGRAPHY).strip().splitlines()
        section: list[str] = []
        sections = [section]
        for line in lines:
            if _UNDERLINE.match(line) and section and section[-1].strip():
                title = section.pop()
                section = [title, ""]
                sections.append(section)
            else:
                section.append(line)
        for section in sections:
            text = _clean_section(section)
            if len(text) >= 200:
                found.setdefault(text)
    return list(found)


def split(texts: list[str], *, held_out: float, seed: int) -> tuple[list[str], list[str]]:
    """`texts` in random order, as (training, held-out); `held_out` is a share of the number of sections."""
    shuffled = list(texts)
    random.Random(seed).shuffle(shuffled)
    count = round(len(shuffled) * held_out)
    return shuffled[count:], shuffled[:count]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer: every string has an encoding, and decoding gives the string back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The id of `<|endoftext|>`.

    Raises:
        ValueError: the tokenizer has no such token.
    """
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise ValueError(f"the tokenizer has no {END_OF_TEXT} token")
    return token
