// The tree of a conversation's messages: branches, siblings and what is sent to the model.

import type { Conversation, Message } from './types';

/** The messages from the first to `leaf`. */
export function pathTo(messages: readonly Message[], leaf: string | null): Message[] {
  const byId = new Map(messages.map((message) => [message.id, message]));
  const path: Message[] = [];
  let at = leaf === null ? undefined : byId.get(leaf);
  while (at !== undefined && path.length <= messages.length) {
    path.push(at);
    at = at.parent === null ? undefined : byId.get(at.parent);
  }
  return path.reverse();
}

/** The versions that stand at one place of the conversation, oldest first. */
export function siblings(messages: readonly Message[], message: Message): Message[] {
  return messages
    .filter((other) => other.parent === message.parent && other.role === message.role)
    .sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
}

/** The end of the branch below `id` that was written to last. */
export function lastLeaf(messages: readonly Message[], id: string): string {
  const children = new Map<string, Message[]>();
  for (const message of messages) {
    if (message.parent === null) continue;
    const list = children.get(message.parent);
    if (list === undefined) children.set(message.parent, [message]);
    else list.push(message);
  }
  let at = id;
  for (;;) {
    const next = children.get(at)?.reduce((a, b) => (b.created >= a.created ? b : a));
    if (next === undefined) return at;
    at = next.id;
  }
}

/** The message and everything below it. */
export function subtree(messages: readonly Message[], id: string): Set<string> {
  const inside = new Set([id]);
  let grown = true;
  while (grown) {
    grown = false;
    for (const message of messages) {
      if (message.parent !== null && inside.has(message.parent) && !inside.has(message.id)) {
        inside.add(message.id);
        grown = true;
      }
    }
  }
  return inside;
}

/** An answer without its thinking: models are not shown their own earlier thoughts. */
export function withoutThinking(content: string): string {
  return content.replace(/^\s*<think>[\s\S]*?(?:<\/think>|$)\s*/, '');
}

/** The body of the request that continues `path` (which ends with a message of the user). */
export function requestBody(
  conversation: Pick<Conversation, 'system' | 'params'>,
  model: string,
  path: readonly Message[],
): Record<string, unknown> {
  const messages: { role: string; content: string }[] = [];
  if (conversation.system.trim() !== '') messages.push({ role: 'system', content: conversation.system });
  for (const { role, content } of path) {
    const text = role === 'assistant' ? withoutThinking(content) : content;
    if (text.trim() === '') continue;
    const last = messages.at(-1);
    // A failed answer leaves two turns of the user in a row, which many chat templates refuse.
    if (last !== undefined && last.role === role) last.content += `\n\n${text}`;
    else messages.push({ role, content: text });
  }
  const { stream, stop, ...numbers } = conversation.params;
  const body: Record<string, unknown> = { model, messages, stream };
  if (stream) body.stream_options = { include_usage: true };
  for (const [name, value] of Object.entries(numbers)) if (value !== null) body[name] = value;
  if (stop.length > 0) body.stop = stop;
  return body;
}

export function titleFrom(text: string): string {
  const line = text.trim().replace(/\s+/g, ' ');
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}
