// One answer being written. It lives outside the components, so it goes on while another tab is looked at.

import { api, reportStatus } from '../api/client';
import { live } from '../api/live.svelte';
import { ENDED, type Call } from '../api/types';
import { readAnswer, type AnswerEnd, type Usage } from './answer';
import type { AnswerStats, Message } from './types';

/** How often a growing answer is written to the browser's database. */
const SAVE_MS = 1500;

export class Run {
  /** All text so far. Not reactive: views read it once per frame. */
  text = '';
  tokens = $state(0);
  /** Tokens per second since the first one. */
  rate = $state(0);
  callId = $state('');
  comment = $state('');
  state = $state<'waiting' | 'writing' | 'ended'>('waiting');

  private pieces = 0;
  private readonly started = performance.now();
  private firstAt = 0;
  private lastAt = 0;
  private usage: Usage | null = null;
  private readonly abort = new AbortController();
  private saved = 0;

  constructor(
    readonly message: Message,
    private readonly save: (message: Message) => void,
  ) {}

  stop(): void {
    this.abort.abort();
  }

  /** The call as the event stream shows it, once the tracker has named it. */
  get call(): Call | undefined {
    return this.callId === '' ? undefined : live.calls.get(this.callId);
  }

  /** Sends the request, reads to the end, and gives the message as it stays. */
  async go(body: Record<string, unknown>): Promise<Message> {
    requestAnimationFrame(this.frame);
    let end: AnswerEnd | { kind: 'stopped' };
    try {
      const response = await fetch('/v1/chat/completions', {
        method: 'POST',
        credentials: 'same-origin',
        headers: { 'content-type': 'application/json' },
        body: JSON.stringify(body),
        signal: this.abort.signal,
      });
      reportStatus(response.status);
      this.callId = response.headers.get('x-meshnet-call') ?? '';
      end = await readAnswer(response, {
        text: (delta) => this.take(delta),
        comment: (text) => (this.comment = text),
        usage: (usage) => (this.usage = usage),
      });
    } catch (cause) {
      if (this.abort.signal.aborted) end = { kind: 'stopped' };
      else if (this.text === '') {
        end = { kind: 'error', error: { message: 'The tracker does not answer.', code: 'unreachable' } };
      } else end = { kind: 'cut' };
      if (!(cause instanceof TypeError || cause instanceof DOMException)) console.error(cause);
    }
    this.tokens = this.pieces;
    this.state = 'ended';
    const stats = await this.stats();
    const { streaming: _, ...rest } = this.message;
    const message: Message = { ...rest, content: this.text };
    if (this.callId !== '') message.call = this.callId;
    if (stats !== null) message.stats = stats;
    if (end.kind === 'done') message.finish = end.finish;
    else if (end.kind === 'error') message.error = end.error;
    else message.ending = end.kind;
    return message;
  }

  private take(delta: string): void {
    const now = performance.now();
    if (this.pieces === 0) {
      this.firstAt = now;
      this.state = 'writing';
    }
    this.lastAt = now;
    this.pieces += 1;
    this.text += delta;
    if (now - this.saved > SAVE_MS) {
      this.saved = now;
      this.save({ ...this.message, content: this.text });
    }
  }

  private frame = (): void => {
    if (this.state === 'ended') return;
    if (this.tokens !== this.pieces) {
      this.tokens = this.pieces;
      const seconds = (this.lastAt - this.firstAt) / 1000;
      this.rate = seconds > 0 ? (this.pieces - 1) / seconds : 0;
    }
    requestAnimationFrame(this.frame);
  };

  /** The tracker's figures for the call; what this page saw where it has none. */
  private async stats(): Promise<AnswerStats | null> {
    const call = this.callId === '' ? null : await this.endedCall();
    if (call === null && this.pieces === 0) return null;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return {
      tokens: call?.output_tokens || this.usage?.completion_tokens || this.pieces,
      prompt_tokens: call?.prompt_tokens ?? this.usage?.prompt_tokens ?? null,
      tokens_per_second: call?.tokens_per_second ?? (seconds > 0 ? (this.pieces - 1) / seconds : null),
      ttft_ms: call?.ttft_ms ?? (this.firstAt > 0 ? this.firstAt - this.started : null),
      stages: call?.stages ?? [],
      reroutes: call?.reroutes ?? 0,
      numerics_changed: call?.numerics_changed ?? false,
    };
  }

  private async endedCall(): Promise<Call | null> {
    let call: Call | null = null;
    for (const pause of [0, 150, 400]) {
      await new Promise((resolve) => setTimeout(resolve, pause));
      try {
        call = await api<Call>('GET', `/api/calls/${encodeURIComponent(this.callId)}`);
      } catch {
        return call;
      }
      if (ENDED.has(call.phase)) return call;
    }
    return call;
  }
}
