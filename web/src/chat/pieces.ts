// Where a long Markdown block may be cut, so that the pieces, rendered each by itself and joined, look like the whole.

/** As what a block goes on after a piece of it. */
export type GoesOn =
  /** Lines of code, until a fence like this one. */
  | { kind: 'code'; fence: string }
  /** Rows of the table with this head: its first two lines. */
  | { kind: 'table'; head: string }
  | { kind: 'list' }
  | { kind: 'text' };

export interface Piece {
  length: number;
  goesOn: GoesOn;
}

export const FENCE = /^(\s*)(`{3,}|~{3,})(.*)$/;
export const LIST = /^([-*+]|\d{1,9}[.)])(\s|$)/;
const TAG = /^<(\/?)([a-z]+)(?=[\s>/])/i;
/** An item that begins a list right under a paragraph. */
export const NEW_LIST = /^(?:[-*+]|1[.)])\s+\S/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
/** Starts of a first line that make the block something else than a paragraph. */
const NO_TEXT = /^(\s|#{1,6}\s|>|<|\$\$|\\\[|\[[^\]]*\]:|[-*+=]|\d{1,9}[.)]\s|`{3}|~{3})/;

/** Characters from which on a block is cut at the next place that allows it; rows and items as they are there. */
const LENGTH = { code: 2000, table: 0, list: 0, text: 1500 } as const;
/** An item that has begun, on a line that may go on. */
const ITEM = /^(?:[-*+]|\d{1,9}[.)])\s+\S/;

/**
 * The first piece of the block that `text` begins with, or null: it is short, or may not be cut, or too little
 * of it is known. Depends on what was settled before and on the text alone, not on how it came.
 */
export function pieceEnd(text: string, from: GoesOn | null): Piece | null {
  if (from === null) {
    const opened = openedCode(text);
    if (opened !== null) return opened;
  }
  const goesOn = from ?? kindOf(text);
  if (goesOn === null || text.length <= LENGTH[goesOn.kind]) return null;
  const length = { code: codeEnd, table: tableEnd, list: listEnd, text: textEnd }[goesOn.kind](text, from === null);
  return length === 0 ? null : { length, goesOn };
}

/** The line that opens a block of code is a piece of its own: its box stands before its first line is there. */
function openedCode(text: string): Piece | null {
  const start = text.length - text.trimStart().length;
  const end = text.indexOf('\n', start);
  if (end < 0) return null;
  const open = FENCE.exec(text.slice(text.lastIndexOf('\n', start) + 1, end));
  if (open === null || open[1] !== '' || (open[2]?.startsWith('`') && open[3]?.includes('`'))) return null;
  return { length: end + 1, goesOn: { kind: 'code', fence: open[2] ?? '' } };
}

function kindOf(text: string): GoesOn | null {
  const body = text.replace(/^(?:[ \t]*\n)+/, '');
  const [first = '', second = ''] = body.split('\n', 2);
  if (LIST.test(first)) return { kind: 'list' };
  if (first.includes('|') && DELIMITERS.test(second) && second.includes('-')) {
    return { kind: 'table', head: `${first}\n${second}\n` };
  }
  return NO_TEXT.test(first) && !/^\*+[^\s*]/.test(first) ? null : { kind: 'text' };
}

function codeEnd(text: string): number {
  return text.indexOf('\n', LENGTH.code) + 1;
}

/** Before a row that has begun, with a row before it. `first`: the head comes before both. */
function tableEnd(text: string, first: boolean): number {
  let at = text.length - text.trimStart().length;
  for (let lines = first ? 3 : 1; lines > 0; lines--) {
    const end = text.indexOf('\n', at);
    if (end < 0) return 0;
    at = end + 1;
  }
  const end = text.indexOf('\n', at);
  return /^ {0,3}\|/.test(text.slice(at, at + 4)) || (end > 0 && text.slice(at, end).includes('|')) ? at : 0;
}

/**
 * Before an item of the list itself, with the mark of the items before, not inside a fence. Two items come
 * `first`: they say whether there is room between items.
 */
function listEnd(text: string, first: boolean): number {
  let fence = '';
  let mark = '';
  let items = 0;
  for (let at = 0; ; ) {
    const newline = text.indexOf('\n', at);
    const end = newline < 0 ? text.length : newline;
    const line = text.slice(at, end);
    if (newline < 0 && !ITEM.test(line)) return 0;
    const border = FENCE.exec(line);
    if (fence !== '') {
      if (border?.[2]?.startsWith(fence) && border[3]?.trim() === '') fence = '';
    } else if (border !== null) {
      fence = border[2] ?? '';
    } else {
      const item = LIST.exec(line)?.[1]?.slice(-1) ?? '';
      if (item !== '' && item === mark && items >= (first ? 2 : 1)) return at;
      if (item !== '') {
        mark = item;
        items += 1;
      }
    }
    if (newline < 0) return 0;
    at = end + 1;
  }
}

/** After a sentence at whose end nothing is open: no emphasis, code, link or formula reaches over the cut. */
function textEnd(text: string): number {
  const open = new Set<string>();
  let brackets = 0;
  for (let at = 0; at < text.length; at++) {
    const char = text.charAt(at);
    if (char === '`') {
      const ticks = run(text, at);
      const close = text.indexOf(ticks, at + ticks.length);
      if (close < 0) return 0;
      at = close + ticks.length - 1;
    } else if (char === '\\') {
      const next = text.charAt(at + 1);
      brackets += next === '(' || next === '[' ? 1 : next === ')' || next === ']' ? -1 : 0;
      at += 1;
    } else if (char === '*' || char === '_' || char === '~' || char === '$') {
      const mark = run(text, at);
      if (marks(text.charAt(at - 1), mark, text.charAt(at + mark.length)) && !open.delete(mark)) open.add(mark);
      at += mark.length - 1;
    } else if (char === '[') {
      brackets += 1;
    } else if (char === ']') {
      brackets -= 1;
    } else if (char === '<') {
      const [, end, tag = ''] = TAG.exec(text.slice(at, at + 64)) ?? [];
      if (end === '/') open.delete(tag);
      else if (tag !== '' && tag !== 'br') open.add(tag);
    } else if (char === '|' || (char === '\n' && NO_TEXT.test(text.slice(at + 1, at + 16)))) {
      return 0;
    } else if (at >= LENGTH.text && brackets === 0 && open.size === 0 && /[.!?,;:)"”…]/.test(text.charAt(at - 1))) {
      // What follows begins a paragraph when rendered by itself, so it must look like one.
      if (/^\s\p{L}/u.test(text.slice(at, at + 3))) return at + 1;
    }
  }
  return 0;
}

/** The same character over and over. */
function run(text: string, at: number): string {
  let end = at + 1;
  while (text.charAt(end) === text.charAt(at)) end += 1;
  return text.slice(at, end);
}

/** Whether such a run between these characters may begin or end something. */
function marks(before: string, run: string, after: string): boolean {
  if (/^\s?$/.test(before) && /^\s?$/.test(after)) return false;
  if (run.startsWith('_') && /\w/.test(before) && /\w/.test(after)) return false;
  return !(run === '$' && /\d/.test(after));
}
