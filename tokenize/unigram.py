"""A Unigram tokenizer with byte fallback, learned by SentencePiece and written as a tokenizer.json.

SentencePiece (Kudo and Richardson 2018) has the trainer of Kudo 2018, and gives the same bytes for the same text with
one thread; that of `tokenizers` gives other scores every time. It is fed with the words that the tokenizer will be
asked for, each once with its count: cut by the same expression as for BPE, spaces as they are. Its pieces and scores
are taken over one by one, the scores rounded (`rounded`), so `tokenizers` cuts every word as SentencePiece does.

No text is taken for the piece of a byte ("<0x41>") or for "<unk>": every expression cuts between letters and digits,
and before or after "<", so such a word never comes up whole.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gristmill.tokenize.shards import TokenError

UNKNOWN_PIECE = "<unk>"  # id 0; never given, since every byte has a piece
_SPACE = "\u2581"  # how SentencePiece writes a space
# What its input, one word a line with a tab and a count, cannot hold goes through other characters.
_HIDDEN = {ord(char): 0xF0000 + ord(char) for char in "\t\n\r"}
_SHOWN = {hidden: char for char, hidden in _HIDDEN.items()} | {ord(_SPACE): " "}
# Characters with another meaning there, U+2585 being its sign for an unknown one. They are spelled in bytes.
RESERVED = frozenset({_SPACE, "\u2585", *map(chr, _HIDDEN.values())})


def learn_unigram(
    texts: Iterable[Iterable[str]],
    vocab_size: int,
    rare: Collection[str],
    cuts: pre_tokenizers.PreTokenizer,
) -> bytes:
    """A SentencePiece model of at most vocab_size pieces, the unknown one and 256 bytes included. texts: in groups.

    rare: characters that get no piece. cuts: how text is cut into words. Raises TokenError where it cannot be learned.
    """
    model = io.BytesIO()
    words = _words(texts, RESERVED | set(rare), cuts)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(words), model_writer=model, input_format="tsv", model_type="unigram",
            vocab_size=vocab_size, hard_vocab_limit=False, character_coverage=1.0, byte_fallback=True,
            normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
            split_by_whitespace=False, split_by_unicode_script=False, split_by_number=False,
            allow_whitespace_only_pieces=True, unk_id=0, unk_piece=UNKNOWN_PIECE, bos_id=-1, eos_id=-1, pad_id=-1,
            num_threads=1, minloglevel=3,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        raise TokenError(
            f"SentencePiece cannot learn {vocab_size:,} pieces from this text: {error} Give it more text, or another "
            "vocab_size."
        ) from error
    return model.getvalue()


def from_sentencepiece(model: bytes, cuts: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """The tokenizer of a model that was trained on words cut by `cuts`."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = pieces.vocab_size()
    vocab = [(pieces.id_to_piece(i).translate(_SHOWN), rounded(pieces.get_score(i))) for i in range(size)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=pieces.unk_id(), byte_fallback=True))
    tokenizer.pre_tokenizer = cuts
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def rounded(score: float) -> float:
    """A logarithm of a probability as a multiple of 2^-10: its sums are exact in 32 bits up to 2^14, in any order.

    Without it, of two ways to cut "     " into "   " and "  " that are equally likely, one program takes the first and
    another the second: SentencePiece adds in 32 bits, `tokenizers` in 64.
    """
    return round(score * 1024) / 1024


def as_sentencepiece(word: str) -> str:
    """A word as the model saw it; for comparison with SentencePiece itself."""
    return word.translate(_HIDDEN)


def _words(texts: Iterable[Iterable[str]], without: Collection[str], cuts: pre_tokenizers.PreTokenizer) -> Counter[str]:
    """How often each word occurs. Words are cut at characters that get no piece, as SentencePiece does itself."""
    counts: Counter[str] = Counter()
    for part in texts:
        for text in part:
            counts.update(word for word, _ in cuts.pre_tokenize_str(text))
    expression = re.compile("[" + "".join(map(re.escape, sorted(without))) + "]")
    for word in [word for word in counts if expression.search(word)]:
        count = counts.pop(word)
        for piece in expression.split(word):
            if piece:
                counts[piece] += count
    return counts


def _lines(words: Counter[str]) -> Iterator[str]:
    """In the order of code points, so that the order of documents does not matter."""
    for word in sorted(words):
        yield f"{word.translate(_HIDDEN)}\t{words[word]}"
