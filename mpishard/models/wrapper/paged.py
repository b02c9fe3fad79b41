"""Many sequences of tokens continued at once, their keys and values in blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpishard.base import Array
from mpishard.models.wrapper.base import ShardedModelBase
from mpishard.models.wrapper.wrapped import require_alike
from mpishard.nn import GPT, KeyValueCache, check_drawing, checked_prompt, draw


class PagedModel:
    """A language model that continues many sequences at once.

    Sequences of different lengths share the blocks of one `mpishard.nn.KeyValueCache`. New ones
    begin, and ended ones free their blocks, while others continue. Keys and values are kept on the
    ranks that compute them: under tensor parallelism each rank keeps those of its heads, in a
    pipeline those of its layers. With a sharded model every method but `free` is collective, and
    every rank makes the same calls.

    Parameters
    ----------
    model : GPT or ShardedModelBase
        The model, or a sharded one of it. It must not be trained while sequences are kept.
    block_count : int
        Number of blocks that all sequences share.
    block_size : int
        Positions of a block.

    Attributes
    ----------
    cache : KeyValueCache
        The blocks.

    Raises
    ------
    TypeError
        For another model.
    ValueError
        For sizes that are no integers >= 1.

    Examples
    --------
    >>> import mpishard as ms
    >>> from mpishard.models import PagedModel
    >>> sizes = {"vocabulary_size": 11, "context_length": 16, "width": 12, "heads": 3, "layers": 1}
    >>> paged = PagedModel(ms.nn.GPT(**sizes), block_count=8, block_size=4)
    >>> one, logits_of_one = paged.prefill([1, 2, 3])
    >>> two, logits_of_two = paged.prefill([4, 5])
    >>> logits = paged.step({one: logits_of_one.argmax(), two: logits_of_two.argmax()})
    >>> [paged.cache.length(sequence) for sequence in (one, two)], paged.cache.free_blocks
    ([4, 3], 6)
    """

    def __init__(
        self, model: GPT | ShardedModelBase, block_count: int, block_size: int = 16
    ) -> None:
        plain = model.wrapped_model if isinstance(model, ShardedModelBase) else model
        if not isinstance(plain, GPT):
            raise TypeError(f"PagedModel takes a GPT or a sharded GPT, got {type(plain).__name__}")
        self.cache = KeyValueCache(block_count, block_size)
        self._engine = model.engine if isinstance(model, ShardedModelBase) else None
        self._predict_next = (self._engine or plain).predict_next
        self._vocabulary_size = plain.vocabulary_size
        self._context_length = plain.context_length

    def prefill(self, prompt: object) -> tuple[int, Array]:
        """Begin a sequence with tokens of shape (P,), P >= 1.

        Returns
        -------
        sequence : int
            Its number, by which `step` and `free` know it.
        logits_V : Array
            Prediction of its next token.

        Raises
        ------
        ValueError
            For wrong tokens, and if context or free blocks do not suffice; nothing has changed.
        """
        self._require_alike("prefill", np.asarray(prompt).tolist())
        return self._begin(checked_prompt(prompt, self._vocabulary_size))

    def step(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        """Read one token of each of some sequences, in one forward pass.

        Parameters
        ----------
        tokens : mapping
            Sequence -> its next token, from the last logits or elsewhere.

        Returns
        -------
        dict
            Sequence -> prediction of the token after it, logits of shape (V,).

        Raises
        ------
        ValueError
            As `prefill`, for any of the sequences; no token has been read then.
        """
        numbers = {sequence: int(token) for sequence, token in tokens.items()}
        self._require_alike("step", numbers)
        return self._step(numbers)

    def free(self, sequence: int) -> None:
        """End a sequence: others may have its blocks."""
        self.cache.free(sequence)

    def generate(
        self,
        prompts: Sequence[object],
        length: int,
        temperature: float = 1.0,
        seed: int = 0,
        top_k: int | None = None,
    ) -> list[Array]:
        """Continue several prompts by ``length`` tokens, each as `GPT.generate` continues it alone.

        Returns
        -------
        list of numpy.ndarray of int64, shape (P + length,)
            Each prompt and its continuation.

        Raises
        ------
        ValueError
            As `GPT.generate`, and if a continuation is longer than the context, or the free blocks
            do not suffice for all of them to their ends; before anything is computed.
        """
        self._require_alike(
            "generate",
            ([np.asarray(p).tolist() for p in prompts], length, temperature, seed, top_k),
        )
        check_drawing(length, temperature, top_k, self._vocabulary_size)
        texts = [checked_prompt(prompt, self._vocabulary_size).tolist() for prompt in prompts]
        if not length:
            return [np.array(text, np.int64) for text in texts]
        lengths = [len(text) + length - 1 for text in texts]  # the last token is never read
        # All are checked first: a refusal in the middle would lose the tokens made so far.
        for needed in lengths:
            self._check_length(needed)
        blocks = sum(self.cache.blocks_for(needed) for needed in lengths)
        if blocks > self.cache.free_blocks:
            raise ValueError(
                f"{len(texts)} sequences of up to {max(lengths)} positions need {blocks} blocks of "
                f"{self.cache.block_size}, and {self.cache.free_blocks} of "
                f"{self.cache.block_count} are free: generate fewer at once, or make more blocks"
            )
        begun: dict[int, list[int]] = {}
        logits: dict[int, Array] = {}
        try:
            for text in texts:
                sequence, logits[sequence] = self._begin(np.array(text))
                begun[sequence] = text
            # One for each, so that a continuation does not depend on what is generated beside it.
            generators = {sequence: np.random.default_rng(seed) for sequence in begun}
            for count in range(length):
                if count:
                    logits = self._step({s: text[-1] for s, text in begun.items()})
                for s, text in begun.items():
                    text.append(draw(logits[s], temperature, top_k, generators[s]))
        finally:
            for sequence in begun:
                self.free(sequence)
        return [np.array(text, np.int64) for text in texts]

    def _begin(self, prompt: Array) -> tuple[int, Array]:
        self._check_length(len(prompt))
        sequence = self.cache.add()
        try:
            return sequence, self._read([sequence], prompt[None])[0]
        except BaseException:
            # The caller does not get its number, so its blocks would never be freed.
            self.cache.free(sequence)
            raise

    def _step(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        for sequence in tokens:
            self._check_length(self.cache.length(sequence) + 1)
        column_B1 = np.array([[token] for token in tokens.values()], np.int64)
        checked_prompt(column_B1[:, 0], self._vocabulary_size)
        return dict(zip(tokens, self._read([*tokens], column_B1), strict=True))

    def _read(self, sequences: Sequence[int], tokens_BT: Array) -> Array:
        with self.cache.reading(sequences, tokens_BT.shape[1]):
            return self._predict_next(tokens_BT, self.cache)

    def _check_length(self, positions: int) -> None:
        if positions > self._context_length:
            raise ValueError(
                f"a sequence of {positions} positions is longer than the model's context of "
                f"{self._context_length}"
            )

    def _require_alike(self, name: str, arguments: object) -> None:
        if self._engine is not None:
            require_alike(self._engine.world, f"{name}: the arguments", arguments)
