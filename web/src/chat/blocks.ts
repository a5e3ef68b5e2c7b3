// Cuts a growing Markdown text into blocks that will not change any more, so that each is rendered once.

export type BlockOp =
  /** Text to add to the open end. */
  | { op: 'append'; text: string }
  /** The open end is complete: replace it by this source, rendered. */
  | { op: 'settle'; source: string }
  | { op: 'think-start' }
  | { op: 'think-end' };

const OPEN = '<think>';
const CLOSE = '</think>';
const FENCE = /^(\s*)(`{3,}|~{3,})(.*)$/;
const LIST = /^([-*+]|\d{1,9}[.)])(\s|$)/;

/**
 * The length of the first block in `text`, or 0 while it may still grow. A block ends at a blank line that is
 * not inside a fence and whose next line cannot belong to it, or right after a fence closes.
 */
export function blockEnd(text: string): number {
  let fence = '';
  let indented = false;
  let list = false;
  let started = false;
  let blank = false;
  let at = 0;
  while (at < text.length) {
    const newline = text.indexOf('\n', at);
    const complete = newline >= 0;
    const next = complete ? newline + 1 : text.length;
    const line = text.slice(at, complete ? newline : next);
    if (fence !== '') {
      const close = FENCE.exec(line);
      if (complete && close?.[2]?.startsWith(fence) && close[3]?.trim() === '') {
        fence = '';
        if (!indented) return next;
      }
    } else if (line.trim() === '') {
      blank = started;
    } else {
      if (blank) {
        // Too little of the line is known to say whether it goes on with a list or is indented.
        if (!complete && line.trim().length < 4) return 0;
        const goesOn = /^(\s{2,}|\t)/.test(line) || (list && LIST.test(line));
        if (!goesOn) return at;
        blank = false;
      }
      const open = FENCE.exec(line);
      if (open !== null && complete) {
        fence = open[2] ?? '';
        indented = open[1] !== '';
        // A fence right under a paragraph is a block of its own.
        if (started && !indented && !list) return at;
      } else if (!started) {
        list = LIST.test(line);
      }
      started = true;
    }
    at = next;
  }
  return 0;
}

/** Feeds on pieces of an answer and says what to do with the page; the same for live and for stored text. */
export class BlockFeed {
  private tail = '';
  private shown = 0;
  private thinking = false;

  feed(piece: string): BlockOp[] {
    const ops: BlockOp[] = [];
    this.tail += piece;
    let held = 0;
    for (;;) {
      if (this.thinking) {
        const close = this.tail.indexOf(CLOSE);
        if (close >= 0) {
          const end = blockEnd(this.tail.slice(0, close));
          this.settle(end === 0 ? close : end, ops);
          if (end > 0) continue;
          this.drop(CLOSE.length);
          this.thinking = false;
          ops.push({ op: 'think-end' });
          continue;
        }
        held = partialSuffix(this.tail, CLOSE);
      } else {
        const start = this.tail.trimStart();
        if (start.startsWith(OPEN)) {
          this.drop(this.tail.length - start.length + OPEN.length);
          this.thinking = true;
          ops.push({ op: 'think-start' });
          continue;
        }
        held = start !== '' && OPEN.startsWith(start) ? start.length : 0;
      }
      const end = blockEnd(this.tail);
      if (end === 0) break;
      this.settle(end, ops);
    }
    const to = this.tail.length - held;
    // Leading blank lines of a block would only show as a gap.
    if (this.shown === 0) this.shown = this.tail.length - this.tail.trimStart().length;
    if (to > this.shown) {
      ops.push({ op: 'append', text: this.tail.slice(this.shown, to) });
      this.shown = to;
    }
    return ops;
  }

  end(): BlockOp[] {
    const ops: BlockOp[] = [];
    this.settle(this.tail.length, ops);
    if (this.thinking) ops.push({ op: 'think-end' });
    this.thinking = false;
    return ops;
  }

  private settle(length: number, ops: BlockOp[]): void {
    const source = this.tail.slice(0, length);
    this.drop(length);
    if (source.trim() !== '') ops.push({ op: 'settle', source });
  }

  private drop(length: number): void {
    this.tail = this.tail.slice(length);
    this.shown = 0;
  }
}

/** How much of the end of `text` may be the start of `mark`. */
function partialSuffix(text: string, mark: string): number {
  for (let length = Math.min(mark.length - 1, text.length); length > 0; length--) {
    if (mark.startsWith(text.slice(-length))) return length;
  }
  return 0;
}
