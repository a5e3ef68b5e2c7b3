// Server-sent events, read from bytes as they come: any cut is fine, inside a character or a line end too.

export interface SseEvent {
  event: string;
  data: string;
  /** The last id seen on the stream, '' when none was sent. */
  id: string;
}

export interface SseItems {
  events: SseEvent[];
  comments: string[];
}

/**
 * Incremental parser after the HTML standard, section 9.2.6, with two additions for API streams: comments
 * are handed out, and `end()` gives the last event even when its closing blank line is missing.
 */
export class SseParser {
  private readonly decoder = new TextDecoder('utf-8');
  private rest = '';
  private afterCr = false;
  private event = '';
  private data: string[] = [];
  private id = '';

  push(bytes: Uint8Array): SseItems {
    return this.read(this.decoder.decode(bytes, { stream: true }));
  }

  end(): SseItems {
    const out = this.read(this.decoder.decode());
    if (this.rest !== '') this.line(this.rest, out);
    this.rest = '';
    this.dispatch(out);
    return out;
  }

  private read(text: string): SseItems {
    const out: SseItems = { events: [], comments: [] };
    // A CR ended the previous piece: an LF that comes now belongs to it.
    if (this.afterCr && text !== '') {
      this.afterCr = false;
      if (text.startsWith('\n')) text = text.slice(1);
    }
    let from = 0;
    for (let at = 0; at < text.length; at++) {
      const char = text.charCodeAt(at);
      if (char !== 10 && char !== 13) continue;
      this.line(this.rest + text.slice(from, at), out);
      this.rest = '';
      if (char === 13) {
        if (at + 1 === text.length) this.afterCr = true;
        else if (text.charCodeAt(at + 1) === 10) at++;
      }
      from = at + 1;
    }
    this.rest += text.slice(from);
    return out;
  }

  private line(line: string, out: SseItems): void {
    if (line === '') {
      this.dispatch(out);
      return;
    }
    const colon = line.indexOf(':');
    if (colon === 0) {
      out.comments.push(line.slice(1).trim());
      return;
    }
    const field = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? '' : line.slice(colon + 1);
    if (value.startsWith(' ')) value = value.slice(1);
    if (field === 'data') this.data.push(value);
    else if (field === 'event') this.event = value;
    else if (field === 'id' && !value.includes('\0')) this.id = value;
  }

  private dispatch(out: SseItems): void {
    if (this.data.length > 0) {
      out.events.push({ event: this.event || 'message', data: this.data.join('\n'), id: this.id });
    }
    this.event = '';
    this.data = [];
  }
}

/** Reads a body to its end and hands over what each chunk completed. Throws what the reader throws. */
export async function readSse(
  body: ReadableStream<Uint8Array>,
  take: (items: SseItems) => void,
): Promise<void> {
  const parser = new SseParser();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      take(parser.push(value));
    }
    take(parser.end());
  } finally {
    reader.releaseLock();
  }
}
