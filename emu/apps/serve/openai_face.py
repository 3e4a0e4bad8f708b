"""OpenAI's form of answers: completions and chats, whole and as streams.

Plain filler has a short way: the parts of a chunk that are the same for all tokens are made once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from emu.apps.serve.calls import Call
from emu.apps.serve.choices import Choice, Exchange
from emu.apps.serve.faces import DONE, Face, Token, compact, event
from emu.apps.serve.logprobs import chat_logprobs, completion_logprobs, prompt_pieces
from emu.apps.serve.pace import AnswerPace
from emu.apps.serve.script import Part
from emu.apps.serve.service import Service
from emu.apps.serve.stencils import Stencil
from emu.units import NS_PER_MS


def usage_of(call: Call, exchange: Exchange) -> dict[str, object]:
    """OpenAI's `usage`."""
    choices = exchange.choices
    prompt = sum(len(p) for p in call.prompts)
    produced = 0 if call.max_tokens == 0 else sum(c.produced for c in choices)
    cached = sum(c.request.prefix_hit_tokens for c in choices[:: call.n])
    thought = sum(c.script.reasoning_tokens for c in choices if c.script is not None)
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": produced,
        "total_tokens": prompt + produced,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if thought:
        usage["completion_tokens_details"] = {"reasoning_tokens": thought}
    return usage


class OpenAiFace(Face):
    """Completions and chats."""

    def __init__(self, service: Service, call: Call, exchange: Exchange) -> None:
        super().__init__(service, call, exchange)
        kind = "chatcmpl" if call.is_chat else "cmpl"
        self.answer_id = f"{kind}-{call.request_id or f'{service.session}-{service.next_call()}'}"
        self._stencils: dict[int, Stencil] = {}
        """Of the answers that are plain filler, by index."""

    def whole(self) -> bytes:
        """One JSON object."""
        call = self.call
        return compact(
            {
                "id": self.answer_id,
                "object": "chat.completion" if call.is_chat else "text_completion",
                "created": self.created_s,
                "model": self.model,
                "choices": [self._whole_choice(choice) for choice in self.exchange.choices],
                "usage": usage_of(call, self.exchange),
                "system_fingerprint": "emu",
                **self.extra,
            }
        )

    def _whole_choice(self, choice: Choice) -> dict[str, object]:
        call, script = self.call, choice.script
        text = "" if call.max_tokens == 0 else self.text_of(choice)
        answer: dict[str, object] = {"index": choice.index}
        if call.is_chat:
            answer["message"] = self._message(choice, text)
        else:
            answer["text"] = self._echoed(choice) + text if call.echo else text
        answer["logprobs"] = self._logprobs(choice)
        answer["finish_reason"] = self._finish(choice)
        answer["stop_reason"] = script.stop_reason if script is not None else None
        return answer

    def _message(self, choice: Choice, text: str) -> dict[str, object]:
        """The message of a chat."""
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        calls = []
        for part in self.parts_of(choice):
            if part.kind == "reasoning":
                message["reasoning_content"] = self.said(choice, part)
            elif part.kind == "tool":
                function = {"name": part.name, "arguments": self.said(choice, part)}
                calls.append({"id": part.call_id, "type": "function", "function": function})
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return message

    def _finish(self, choice: Choice) -> str:
        reason = choice.finish_reason
        if reason == "tool_calls" and self.call.is_named_tool:
            return "stop"
        return reason

    def _prompt_pieces(self, choice: Choice) -> list[str]:
        prompt = self.call.prompts[choice.index // self.call.n]
        return prompt_pieces(self.service.tokenizer, prompt)

    def _echoed(self, choice: Choice) -> str:
        return "".join(self._prompt_pieces(choice))

    def _logprobs(self, choice: Choice) -> Mapping[str, object] | None:
        """Log-probabilities of a whole answer."""
        call, script, tokenizer = self.call, choice.script, self.service.tokenizer
        if call.logprobs < 0:
            return None
        pieces = script.pieces if script is not None and call.max_tokens != 0 else []
        if call.is_chat:
            return chat_logprobs(tokenizer, pieces, 0, call.logprobs)
        if not call.echo:
            return completion_logprobs(tokenizer, pieces, 0, call.logprobs, offset=0)
        prompt = self._prompt_pieces(choice)
        found = completion_logprobs(tokenizer, prompt, 0, call.logprobs, offset=0, is_prompt=True)
        offset = sum(map(len, prompt))
        more = completion_logprobs(tokenizer, pieces, len(prompt), call.logprobs, offset=offset)
        return {key: found[key] + more[key] for key in found}

    def opening(self) -> bytes:
        """Nothing comes before the first token; what its chunks have in common is made."""
        call = self.call
        if call.max_tokens == 0:
            return b""
        frame = compact(self._frame()).decode()[:-1]
        role, content = ('{"role":"assistant",', '"content":"') if call.is_chat else ("", '"')
        key, close = (',"delta":', '"}') if call.is_chat else (',"text":', '"')
        usage = ',"usage":null' if call.include_usage else ""
        for choice in self.exchange.choices:
            if choice.script is not None:
                continue
            head = f'data: {frame},"choices":[{{"index":{choice.index}{key}'
            tail = f'{close},"logprobs":null,"finish_reason":'
            rest = f"}}]{usage}}}\n\n"
            self._stencils[choice.index] = Stencil(
                first=f"{head}{role}{content}".encode(),
                further=f"{head}{'{' if call.is_chat else ''}{content}".encode(),
                end=f"{tail}null{rest}".encode(),
                last=f'{tail}"{choice.finish_reason}"{rest}'.encode(),
                start=choice.start,
                tokens=choice.tokens,
            )
        return b""

    def _frame(self) -> dict[str, object]:
        kind = "chat.completion.chunk" if self.call.is_chat else "text_completion"
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }

    @property
    def stencil(self) -> Stencil | None:
        """The stencil of all that is still to come, where one is enough."""
        choices = self.exchange.choices
        if len(choices) != 1 or self.call.continuous_usage:
            return None
        return self._stencils.get(choices[0].index)

    def news(self, after: int) -> bytes:
        """One chunk for each token that has not been sent."""
        return b"".join(self._news(after))

    def _news(self, after: int) -> Iterator[bytes]:
        pieces = self.service.piece_bytes
        for choice in self.exchange.choices:
            stencil = self._stencils.get(choice.index)
            if stencil is None:
                for token in self.unsent(choice, after):
                    yield self._chunk(choice, token)
                continue
            end = choice.produced if after == 0 else min(choice.produced, after)
            while choice.sent < end:
                chunk = stencil.chunk(choice.sent, pieces)
                choice.sent += 1
                yield self._with_usage(chunk, choice) if self.call.continuous_usage else chunk

    def _with_usage(self, chunk: bytes, choice: Choice) -> bytes:
        usage = self._usage_so_far(choice)
        head = chunk.rpartition(b"]")[0]
        return head + b'],"usage":' + json.dumps(usage).encode() + b"}\n\n"

    def _usage_so_far(self, choice: Choice) -> dict[str, int]:
        prompt = choice.request.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": choice.sent,
            "total_tokens": prompt + choice.sent,
        }

    def _chunk(self, choice: Choice, token: Token) -> bytes:
        """A token of an answer that is not plain filler."""
        call, script, position = self.call, choice.script, token.position
        text = "" if call.max_tokens == 0 else token.text
        one: dict[str, object] = {"index": choice.index}
        if call.is_chat:
            one["delta"] = _chat_delta(self.parts_of(choice), position, text)
        else:
            one["text"] = self._echoed(choice) + text if call.echo and not position else text
        one["logprobs"] = self._chunk_logprobs(choice, position)
        one["finish_reason"] = self._finish(choice) if token.is_last else None
        one["stop_reason"] = script.stop_reason if script is not None and token.is_last else None
        chunk = {**self._frame(), "choices": [one]}
        if call.continuous_usage:
            chunk["usage"] = self._usage_so_far(choice)
        elif call.include_usage:
            chunk["usage"] = None
        return event(chunk)

    def _chunk_logprobs(self, choice: Choice, position: int) -> Mapping[str, object] | None:
        call, script, tokenizer = self.call, choice.script, self.service.tokenizer
        if call.logprobs < 0:
            return None
        pieces = script.pieces[position : position + 1] if script is not None else []
        if call.max_tokens == 0:
            pieces = []
        if call.is_chat:
            return chat_logprobs(tokenizer, pieces, position, call.logprobs)
        before = sum(map(len, script.pieces[:position])) if script is not None else 0
        if not call.echo:
            return completion_logprobs(tokenizer, pieces, position, call.logprobs, offset=before)
        prompt = self._prompt_pieces(choice)
        offset = sum(map(len, prompt)) + before
        found = completion_logprobs(
            tokenizer, pieces, len(prompt) + position, call.logprobs, offset=offset
        )
        if position:
            return found
        first = completion_logprobs(tokenizer, prompt, 0, call.logprobs, offset=0, is_prompt=True)
        return {key: first[key] + found[key] for key in first}

    def closing(self, pace: AnswerPace) -> bytes:
        """The usage, if it was asked for, with how late the answer was, and the end."""
        if not self.call.include_usage:
            return DONE
        usage = usage_of(self.call, self.exchange)
        known = {
            "verdict": pace.verdict,
            "first_token_late_ms": round(pace.first_late_ns / NS_PER_MS, 3),
            "last_token_late_ms": round(pace.last_late_ns / NS_PER_MS, 3),
        }
        return event({**self._frame(), "choices": [], "usage": usage, "emu_pace": known}) + DONE


def _chat_delta(parts: Sequence[Part], position: int, text: str) -> dict[str, object]:
    """What a token adds to the message of a chat."""
    delta: dict[str, object] = {"role": "assistant"} if position == 0 else {}
    part = next((one for one in parts if position < one.end), parts[-1])
    if part.kind == "reasoning":
        return {**delta, "reasoning_content": text}
    if part.kind == "text":
        return {**delta, "content": text}
    index = sum(one.kind == "tool" for one in parts[: parts.index(part)])
    if position == part.begin:
        function = {"name": part.name, "arguments": text}
        head = {"index": index, "id": part.call_id, "type": "function", "function": function}
        return {**delta, "content": None, "tool_calls": [head]}
    return {**delta, "tool_calls": [{"index": index, "function": {"arguments": text}}]}
