import { describe, expect, it } from 'vitest';
import { readAnswer, type AnswerEnd, type Usage } from '../src/chat/answer';

interface Heard {
  end: AnswerEnd;
  text: string;
  pieces: string[];
  comments: string[];
  usage: Usage | null;
}

async function hear(response: Response): Promise<Heard> {
  const heard: Omit<Heard, 'end' | 'text'> = { pieces: [], comments: [], usage: null };
  const end = await readAnswer(response, {
    text: (delta) => heard.pieces.push(delta),
    comment: (text) => heard.comments.push(text),
    usage: (usage) => (heard.usage = usage),
  });
  return { ...heard, end, text: heard.pieces.join('') };
}

function stream(...parts: (string | Error | DOMException)[]): Response {
  const encoder = new TextEncoder();
  let at = 0;
  const body = new ReadableStream<Uint8Array>({
    pull(controller) {
      const part = parts[at++];
      if (part === undefined) controller.close();
      else if (typeof part === 'string') controller.enqueue(encoder.encode(part));
      else controller.error(part);
    },
  });
  return new Response(body, { headers: { 'content-type': 'text/event-stream; charset=utf-8' } });
}

function data(value: unknown): string {
  return `data: ${typeof value === 'string' ? value : JSON.stringify(value)}\n\n`;
}

function piece(delta: object, finish: string | null = null): string {
  return data({ choices: [{ index: 0, delta, finish_reason: finish }] });
}

describe('a streamed answer', () => {
  it('gives its text, its usage and its end', async () => {
    const heard = await hear(
      stream(
        piece({ role: 'assistant', content: '' }),
        piece({ content: 'Hel' }) + piece({ content: 'lo' }),
        piece({}, 'stop'),
        data({ choices: [], usage: { prompt_tokens: 4, completion_tokens: 2, total_tokens: 6 } }),
        data('[DONE]'),
      ),
    );
    expect(heard.pieces).toEqual(['Hel', 'lo']);
    expect(heard.usage).toMatchObject({ prompt_tokens: 4, completion_tokens: 2 });
    expect(heard.end).toEqual({ kind: 'done', finish: 'stop' });
  });

  it('is whole without [DONE] when a finish reason came', async () => {
    expect((await hear(stream(piece({ content: 'a' }), piece({}, 'length')))).end).toEqual({
      kind: 'done',
      finish: 'length',
    });
  });

  it('is cut when it ends with neither, and keeps what came', async () => {
    const heard = await hear(stream(piece({ content: 'a' })));
    expect(heard.end).toEqual({ kind: 'cut' });
    expect(heard.text).toBe('a');
  });

  it('is cut when the connection breaks, or in the middle of an event', async () => {
    const broken = await hear(stream(piece({ content: 'a' }), new TypeError('network error')));
    expect(broken).toMatchObject({ end: { kind: 'cut' }, text: 'a' });
    const halved = await hear(stream(piece({ content: 'a' }), 'data: {"choices": [{"del'));
    expect(halved).toMatchObject({ end: { kind: 'cut' }, text: 'a' });
  });

  it('ends with the error that the stream carries, and takes nothing after it', async () => {
    const heard = await hear(
      stream(
        piece({ content: 'a' }),
        data({ error: { message: 'node lost', type: 'server_error', code: 'route_lost' } }),
        piece({ content: 'b' }) + data('[DONE]'),
      ),
    );
    expect(heard.end).toEqual({ kind: 'error', error: { message: 'node lost', code: 'route_lost' } });
    expect(heard.text).toBe('a');
  });

  it('hands out keep-alive comments', async () => {
    const heard = await hear(stream(': queued 2\n\n', ': prefill 10/20\n\n', piece({}, 'stop')));
    expect(heard.comments).toEqual(['queued 2', 'prefill 10/20']);
  });

  it('wraps thoughts that come in a field of their own', async () => {
    const heard = await hear(
      stream(
        piece({ reasoning_content: 'Let me ' }),
        piece({ reasoning_content: 'see.' }),
        piece({ content: 'Yes.' }),
        piece({}, 'stop'),
      ),
    );
    expect(heard.text).toBe('<think>Let me see.</think>\n\nYes.');
  });

  it('closes thoughts that nothing follows', async () => {
    expect((await hear(stream(piece({ reasoning_content: 'hm' }), piece({}, 'length')))).text).toBe('<think>hm</think>');
  });

  it('lets an abort through', async () => {
    await expect(hear(stream(new DOMException('aborted', 'AbortError')))).rejects.toThrow('aborted');
  });
});

describe('an answer that is not streamed', () => {
  const json = { 'content-type': 'application/json' };

  it('is read as one piece', async () => {
    const body = {
      choices: [{ message: { role: 'assistant', content: 'All at once.' }, finish_reason: 'stop' }],
      usage: { prompt_tokens: 3, completion_tokens: 4 },
    };
    const heard = await hear(new Response(JSON.stringify(body), { headers: json }));
    expect(heard).toMatchObject({ text: 'All at once.', end: { kind: 'done', finish: 'stop' } });
    expect(heard.usage?.completion_tokens).toBe(4);
  });

  it('is an error with the message and code of its body', async () => {
    const body = { error: { message: 'no complete route', type: 'server_error', code: 'no_route', param: null } };
    const heard = await hear(new Response(JSON.stringify(body), { status: 503, headers: json }));
    expect(heard.end).toEqual({ kind: 'error', error: { message: 'no complete route', code: 'no_route' } });
  });

  it('is an error that names the status when the body says nothing', async () => {
    const heard = await hear(new Response('<html>bad gateway</html>', { status: 502 }));
    expect(heard.end).toMatchObject({ kind: 'error', error: { code: '502' } });
  });
});
