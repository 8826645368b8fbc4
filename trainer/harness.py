"""Our model behind the interface of lm-evaluation-harness: scored where it stands, without an export.

    Harness(open_trained("out/train"))        # an `LM` that `lm_eval.simple_evaluate(model=...)` takes

It gives what the harness's own Hugging Face backend gives for the exported model: contexts get no end-of-text token in
front, an empty one is that token alone, and what is too long loses its beginning. Needs the extra `eval`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tokenizers import Tokenizer

from gristmill.trainer.config import TrainError
from gristmill.trainer.model import Llama
from gristmill.trainer.score import rolling
from gristmill.trainer.trained import Trained, continue_ids

BATCH_TOKENS = 4_096  # of one forward pass, padding included
LOGIT_ROWS = 1_024  # positions whose logits exist at a time
MAX_NEW_TOKENS = 256  # where a task says nothing; the harness's own default

# ((context, continuation) or None, ids of the context, ids of the continuation)
Request = tuple[Any, list[int], list[int]]
Answer = tuple[float, bool]  # nats (<= 0), whether greedy decoding says the same


class Harness(TemplateLM):  # type: ignore[misc]
    """The `LM` of one model. device: where the model is moved to."""

    def __init__(self, trained: Trained, device: str = "cpu"):
        super().__init__()
        self.model: Llama = trained.model.to(device)
        self.encoder = Tokenizer.from_str(trained.tokenizer_json.decode())
        self.eos: int = trained.manifest.eos_id
        self.vocab: int = trained.manifest.vocab_size
        self.max_length: int = trained.run.config.seq_len
        self.where = str(trained.checkpoint)
        self._device = torch.device(device)

    @property
    def eot_token_id(self) -> int:
        return self.eos

    @property
    def tokenizer_name(self) -> str:
        return self.where

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids: list[int] = self.encoder.encode(string, add_special_tokens=False).ids
        return ids

    def tok_decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.encoder.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: Any) -> list[Answer]:
        """In the order of the requests. Raises TrainError for a continuation that is empty or longer than a window."""
        for texts, _context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                said = "an item" if texts is None else f"the answer {texts[1][:80]!r}"
                raise TrainError(
                    f"{self.where}: {said} is {len(continuation):,} tokens, and this model scores 1 to "
                    f"{self.max_length:,} at a time (`seq_len`). Leave the task out, or train with longer windows."
                )
        rows = [
            (i, (context + answer)[-(self.max_length + 1) :], len(answer))
            for i, (_, context, answer) in enumerate(requests)
        ]
        answers: list[Answer | None] = [None] * len(rows)
        for batch in batches(rows):
            for (number, _ids, _count), answer in zip(batch, self._score(batch), strict=True):
                answers[number] = answer
        assert None not in answers
        return answers  # type: ignore[return-value]

    def _score(self, batch: Sequence[tuple[int, list[int], int]]) -> list[Answer]:
        """Each row: the last `count` of its ids, given those before."""
        longest = max(len(ids) for _, ids, _ in batch) - 1
        inputs = torch.zeros(len(batch), longest, dtype=torch.long)
        for r, (_, ids, _count) in enumerate(batch):
            inputs[r, : len(ids) - 1] = torch.tensor(ids[:-1])
        with torch.no_grad():
            hidden = self.model.hidden(inputs.to(self._device))
            states = torch.cat([hidden[r, len(ids) - 1 - n : len(ids) - 1] for r, (_, ids, n) in enumerate(batch)])
            targets = torch.cat([torch.tensor(ids[-n:]) for _, ids, n in batch]).to(self._device)
            nats, greedy = self._compared(states, targets)
        counts = [n for _, _, n in batch]
        return [
            (float(part.sum()), bool(same.all()))
            for part, same in zip(torch.split(nats, counts), torch.split(greedy, counts), strict=True)
        ]

    def _compared(self, states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """states (n, width), targets (n,) -> ln p of each target (n,) float32, whether it is the likeliest (n,)."""
        nats, greedy = [], []
        for low in range(0, len(states), LOGIT_ROWS):
            part, wanted = states[low : low + LOGIT_ROWS], targets[low : low + LOGIT_ROWS]
            logits = F.linear(part, self.model.output_weight.to(part.dtype)).float()  # (rows, vocab)
            nats.append(F.log_softmax(logits, dim=-1).gather(1, wanted[:, None])[:, 0])
            greedy.append(logits.argmax(dim=-1) == wanted)
        return torch.cat(nats), torch.cat(greedy)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Nats of whole texts, cut as `score.rolling` cuts them: as the harness does it, too."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            padded = [self.eos, *ids]  # position p is at p + 1
            for begin, first, stop in rolling(len(ids), self.max_length):
                windows.append((None, padded[begin + 1 : first + 1], padded[first + 1 : stop + 1]))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (nats, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += nats
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        """Everything is computed again for each token: slow, and enough for small models."""
        wanted = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
        stops = handle_stop_sequences(list(wanted["until"]), self.tok_decode([self.eos], skip_special_tokens=False))
        room = self.max_length - wanted["max_gen_toks"]
        if room < 1:
            raise TrainError(
                f"{self.where}: a task wants {wanted['max_gen_toks']} new tokens, and this model's window has "
                f"{self.max_length}. Set `max_gen_toks` in the task's generation_kwargs, or train with longer windows."
            )
        ids = self.tok_encode(context)[-room:] or [self.eos]
        temperature = float(wanted["temperature"] or 0.0) if wanted["do_sample"] else 0.0
        out: list[int] = []
        for chosen in continue_ids(
            self.model,
            ids,
            wanted["max_gen_toks"],
            self.max_length,
            seed=xxhash.xxh3_64_intdigest(context) >> 1,
            temperature=temperature,
            vocab_size=self.vocab,
        ):
            if chosen == self.eos:
                break
            out.append(chosen)
            if any(stop and stop in self.tok_decode(out) for stop in stops):
                break
        text: str = postprocess_generated_text(self.tok_decode(out), stops, None)
        return text


def batches(rows: Sequence[tuple[int, list[int], int]]) -> Iterator[list[tuple[int, list[int], int]]]:
    """Rows of about equal length together, the longest first: BATCH_TOKENS with padding, or one row."""
    batch: list[tuple[int, list[int], int]] = []
    for row in sorted(rows, key=lambda r: (-len(r[1]), r[0])):
        if batch and (len(batch) + 1) * len(batch[0][1]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
