import { describe, expect, it } from 'vitest';
import { readSse, SseParser, type SseItems } from '../src/api/sse';

const encoder = new TextEncoder();

/** What the parser gives for `bytes` cut into `pieces`. */
function parse(...pieces: Uint8Array[]): SseItems {
  const parser = new SseParser();
  const all: SseItems = { events: [], comments: [] };
  for (const items of [...pieces.map((piece) => parser.push(piece)), parser.end()]) {
    all.events.push(...items.events);
    all.comments.push(...items.comments);
  }
  return all;
}

const STREAMS: Record<string, string> = {
  'line feeds': 'id: 7\nevent: upsert\ndata: {"a": 1}\n\n: keep-alive\n\ndata: [DONE]\n\n',
  'CRLF': 'id: 7\r\nevent: upsert\r\ndata: {"a": 1}\r\n\r\n: keep-alive\r\n\r\ndata: [DONE]\r\n\r\n',
  'lone CRs': 'id: 7\revent: upsert\rdata: {"a": 1}\r\r: keep-alive\r\rdata: [DONE]\r\r',
  'mixed line ends': 'id: 7\r\nevent: upsert\ndata: {"a": 1}\r\r\n: keep-alive\n\ndata: [DONE]\r\n\n',
};

describe.each(Object.entries(STREAMS))('a stream with %s', (_, text) => {
  const bytes = encoder.encode(text);
  const whole = {
    events: [
      { event: 'upsert', data: '{"a": 1}', id: '7' },
      { event: 'message', data: '[DONE]', id: '7' },
    ],
    comments: ['keep-alive'],
  };

  it('is read in one piece', () => {
    expect(parse(bytes)).toEqual(whole);
  });

  it('is read when it is cut at any byte', () => {
    for (let at = 0; at <= bytes.length; at++) {
      expect(parse(bytes.slice(0, at), bytes.slice(at)), `cut at ${at}`).toEqual(whole);
    }
  });

  it('is read byte by byte', () => {
    expect(parse(...[...bytes].map((byte) => new Uint8Array([byte])))).toEqual(whole);
  });
});

describe('the parser', () => {
  it('joins characters that are cut at any of their bytes', () => {
    const text = 'data: é 漢字 🜁 👩‍👩‍👧 ▍\n\n';
    const bytes = encoder.encode(text);
    for (let at = 0; at <= bytes.length; at++) {
      expect(parse(bytes.slice(0, at), bytes.slice(at)).events, `cut at ${at}`).toEqual([
        { event: 'message', data: 'é 漢字 🜁 👩‍👩‍👧 ▍', id: '' },
      ]);
    }
  });

  it('joins data lines, takes one space off, and ignores fields it does not know', () => {
    expect(parse(encoder.encode('data:a\ndata:  b\ndata\nretry: 10\nfoo: bar\n\n')).events).toEqual([
      { event: 'message', data: 'a\n b\n', id: '' },
    ]);
  });

  it('gives no event for a block without data, and forgets its name', () => {
    expect(parse(encoder.encode('event: upsert\n\ndata: x\n\n')).events).toEqual([
      { event: 'message', data: 'x', id: '' },
    ]);
  });

  it('skips a byte order mark', () => {
    expect(parse(encoder.encode('\ufeffdata: x\n\n')).events).toHaveLength(1);
  });

  it('keeps the id across events and refuses one with a NUL', () => {
    expect(parse(encoder.encode('id: 5\ndata: a\n\nid: 6\0\ndata: b\n\n')).events.map((event) => event.id)).toEqual([
      '5',
      '5',
    ]);
  });

  it('gives the last event when its blank line or its line end is missing', () => {
    expect(parse(encoder.encode('data: a\n\ndata: b\n')).events.map((event) => event.data)).toEqual(['a', 'b']);
    expect(parse(encoder.encode('data: a\n\ndata: b')).events.map((event) => event.data)).toEqual(['a', 'b']);
  });

  it('hands out comments, empty ones too', () => {
    expect(parse(encoder.encode(': prefill 512/2048\n:\n\n')).comments).toEqual(['prefill 512/2048', '']);
  });
});

describe('readSse', () => {
  it('hands over what each chunk completed and ends with the body', async () => {
    const body = new ReadableStream<Uint8Array>({
      start(controller) {
        for (const piece of ['data: on', 'e\n\ndata: two\n\nda', 'ta: three']) controller.enqueue(encoder.encode(piece));
        controller.close();
      },
    });
    const seen: string[][] = [];
    await readSse(body, (items) => seen.push(items.events.map((event) => event.data)));
    expect(seen).toEqual([[], ['one', 'two'], [], ['three']]);
  });

  it('passes on what breaks the body', async () => {
    const body = new ReadableStream<Uint8Array>({
      pull(controller) {
        controller.error(new TypeError('network error'));
      },
    });
    await expect(readSse(body, () => undefined)).rejects.toThrow('network error');
  });
});
