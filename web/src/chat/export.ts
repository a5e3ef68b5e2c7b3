// Conversations as files.

import { chats } from './chats.svelte';
import { pathTo } from './tree';
import type { Conversation, Message } from './types';

function download(name: string, type: string, text: string): void {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function fileName(title: string): string {
  return title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '').slice(0, 50) || 'chat';
}

/** The shown branch, as a person reads it. */
export function toMarkdown(conversation: Conversation, messages: readonly Message[]): string {
  const parts = [`# ${conversation.title}`];
  if (conversation.system.trim() !== '') parts.push(`## System\n\n${conversation.system.trim()}`);
  for (const message of pathTo(messages, conversation.leaf)) {
    const who = message.role === 'user' ? 'You' : (message.model ?? 'Answer');
    parts.push(`## ${who}\n\n${message.content.trim() || '(empty)'}`);
  }
  return `${parts.join('\n\n')}\n`;
}

export async function exportMarkdown(conversation: Conversation): Promise<void> {
  const messages = await chats.messagesOf(conversation.id);
  download(`${fileName(conversation.title)}.md`, 'text/markdown', toMarkdown(conversation, messages));
}

/** Everything: all branches, parameters and figures. */
export async function exportJson(conversation: Conversation): Promise<void> {
  const messages = await chats.messagesOf(conversation.id);
  const text = JSON.stringify({ conversation, messages }, null, 2);
  download(`${fileName(conversation.title)}.json`, 'application/json', text);
}

export async function exportAll(): Promise<void> {
  const all = [];
  for (const conversation of chats.list) {
    all.push({ conversation, messages: await chats.messagesOf(conversation.id) });
  }
  download('meshnet-chats.json', 'application/json', JSON.stringify(all, null, 2));
}
