// Cuts a growing Markdown text into blocks that will not change any more, so that each is rendered once. A long
// block is settled in pieces, so that no piece of work on it is long.

import { FENCE, LIST, NEW_LIST, pieceEnd, type GoesOn } from './pieces';

export type BlockOp =
  /** Text to add to the open end. */
  | { op: 'append'; text: string }
  /**
   * The open end is complete: replace it by this source, rendered. `joins`: it goes on with the block before
   * (in code it is the text itself). `goesOn`: so will what follows. The last piece of a block may be empty.
   */
  | { op: 'settle'; source: string; joins: boolean; goesOn: GoesOn['kind'] | null }
  | { op: 'think-start' }
  | { op: 'think-end' };

const OPEN = '<think>';
const CLOSE = '</think>';

/**
 * The length of the first block in `text`, or 0 while it may still grow. A block ends at a blank line that is
 * not inside a fence and whose next line cannot belong to it, or right after a fence closes. `from`: the block
 * began before, and this is what it goes on as.
 */
export function blockEnd(text: string, from: GoesOn | null = null): number {
  let fence = from?.kind === 'code' ? from.fence : '';
  let indented = false;
  let list = from?.kind === 'list';
  let started = from !== null;
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
      if (started && !list && NEW_LIST.test(line)) return at;
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
  private open: GoesOn | null = null;

  feed(piece: string): BlockOp[] {
    const ops: BlockOp[] = [];
    this.tail += piece;
    let held = 0;
    for (;;) {
      if (this.thinking) {
        const close = this.tail.indexOf(CLOSE);
        if (close >= 0) {
          const thought = this.tail.slice(0, close);
          if (this.cut(thought, ops)) continue;
          this.settle(close, ops);
          this.drop(CLOSE.length);
          this.thinking = false;
          ops.push({ op: 'think-end' });
          continue;
        }
        held = partialSuffix(this.tail, CLOSE);
      } else if (this.open === null) {
        const start = this.tail.trimStart();
        if (start.startsWith(OPEN)) {
          this.drop(this.tail.length - start.length + OPEN.length);
          this.thinking = true;
          ops.push({ op: 'think-start' });
          continue;
        }
        held = start !== '' && OPEN.startsWith(start) ? start.length : 0;
      }
      if (!this.cut(this.tail, ops)) break;
    }
    const to = this.tail.length - held;
    // Leading blank lines of a block would only show as a gap.
    if (this.shown === 0 && this.open === null) this.shown = this.tail.length - this.tail.trimStart().length;
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

  /** Settles the first block of `text`, the start of the tail, or the first piece of a long one, if there is one. */
  private cut(text: string, ops: BlockOp[]): boolean {
    const end = blockEnd(text, this.open);
    const piece = pieceEnd(end === 0 ? text : text.slice(0, end), this.open);
    if (piece === null && end === 0) return false;
    this.settle(piece?.length ?? end, ops, piece?.goesOn);
    return true;
  }

  private settle(length: number, ops: BlockOp[], goesOn: GoesOn | null = null): void {
    let source = this.tail.slice(0, length);
    this.drop(length);
    const before = this.open;
    this.open = goesOn;
    if (before?.kind === 'code' && goesOn === null) source = withoutFence(source, before.fence);
    else if (before?.kind === 'table') source = before.head + source;
    const joins = before !== null;
    if (joins || source.trim() !== '') ops.push({ op: 'settle', source, joins, goesOn: goesOn?.kind ?? null });
  }

  private drop(length: number): void {
    this.tail = this.tail.slice(length);
    this.shown = 0;
  }
}

/** The end of a block of code without the fence that closes it, if one does. */
function withoutFence(text: string, fence: string): string {
  const body = text.trimEnd();
  const last = body.lastIndexOf('\n') + 1;
  const close = FENCE.exec(body.slice(last));
  return close?.[2]?.startsWith(fence) && close[3] === '' ? body.slice(0, last) : text;
}

/** How much of the end of `text` may be the start of `mark`. */
function partialSuffix(text: string, mark: string): number {
  for (let length = Math.min(mark.length - 1, text.length); length > 0; length--) {
    if (mark.startsWith(text.slice(-length))) return length;
  }
  return 0;
}
