// Reads the answer to a chat request, streamed or not, and says how it ended.

import { errorOf } from '../api/client';
import { readSse, type SseEvent } from '../api/sse';
import type { AnswerError } from './types';

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
}

export interface AnswerSink {
  text(delta: string): void;
  /** A keep-alive comment: the place in the queue or the prefill's progress. */
  comment(text: string): void;
  usage(usage: Usage): void;
}

export type AnswerEnd =
  | { kind: 'done'; finish: string }
  | { kind: 'error'; error: AnswerError }
  /** The connection ended before the answer did. */
  | { kind: 'cut' };

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  reasoning?: string | null;
}

interface Chunk {
  error?: { message?: string; code?: string | null; type?: string } | string;
  usage?: Usage | null;
  choices?: { delta?: Delta; message?: Delta; finish_reason?: string | null }[];
}

/** Turns chunks into text; thoughts that come in a field of their own are wrapped as `<think>` blocks. */
export class AnswerReader {
  private finish = '';
  private error: AnswerError | null = null;
  private done = false;
  private thinking = false;

  constructor(private readonly sink: AnswerSink) {}

  get ended(): boolean {
    return this.done || this.error !== null;
  }

  event(event: Pick<SseEvent, 'data'>): void {
    if (this.ended) return;
    if (event.data.trim() === '[DONE]') {
      this.done = true;
      return;
    }
    this.chunk(JSON.parse(event.data) as Chunk);
  }

  chunk(chunk: Chunk): void {
    if (chunk.error) {
      const said = typeof chunk.error === 'string' ? { message: chunk.error } : chunk.error;
      this.error = { message: said.message ?? 'The tracker reported an error.', code: said.code ?? said.type ?? '' };
      return;
    }
    if (chunk.usage) this.sink.usage(chunk.usage);
    const choice = chunk.choices?.[0];
    if (choice === undefined) return;
    const part = choice.delta ?? choice.message ?? {};
    const thought = part.reasoning_content ?? part.reasoning ?? '';
    if (thought !== '') {
      this.sink.text(this.thinking ? thought : `<think>${thought}`);
      this.thinking = true;
    }
    if (part.content) {
      this.sink.text(this.thinking ? `</think>\n\n${part.content}` : part.content);
      this.thinking = false;
    }
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  /** After the last byte. A finish reason without `[DONE]` is a whole answer; neither is a cut one. */
  end(): AnswerEnd {
    if (this.thinking) this.sink.text('</think>');
    if (this.error !== null) return { kind: 'error', error: this.error };
    if (this.done || this.finish !== '') return { kind: 'done', finish: this.finish };
    return { kind: 'cut' };
  }
}

export async function readAnswer(response: Response, sink: AnswerSink): Promise<AnswerEnd> {
  if (!response.ok) {
    const error = await errorOf(response);
    return { kind: 'error', error: { message: error.message, code: error.code || String(error.status) } };
  }
  const reader = new AnswerReader(sink);
  const type = response.headers.get('content-type') ?? '';
  if (!type.startsWith('text/event-stream') || response.body === null) {
    reader.chunk((await response.json()) as Chunk);
    return reader.end();
  }
  try {
    await readSse(response.body, (items) => {
      for (const comment of items.comments) if (comment !== '') sink.comment(comment);
      for (const event of items.events) reader.event(event);
    });
  } catch (cause) {
    if ((cause as { name?: unknown } | null)?.name === 'AbortError') throw cause;
    // A broken connection, or an event cut in its middle: keep what came.
  }
  return reader.end();
}
