import 'fake-indexeddb/auto';
import { describe, expect, it } from 'vitest';
import { ChatStore } from '../src/chat/store';
import { DEFAULT_PARAMS, type Conversation, type Message } from '../src/chat/types';

function conversation(id: string, updated: number): Conversation {
  return { id, title: id, created: 0, updated, model: null, system: '', params: DEFAULT_PARAMS, leaf: null };
}

function message(id: string, owner: string, content: string, more: Partial<Message> = {}): Message {
  return { id, conversation: owner, parent: null, role: 'assistant', content, created: 1, ...more };
}

describe('the store', () => {
  const store = new ChatStore();

  it('keeps conversations, the last used first, and fills in parameters that are new', async () => {
    await store.saveConversation(conversation('old', 1));
    await store.saveConversation({ ...conversation('new', 2), params: { temperature: 1 } as Conversation['params'] });
    const all = await store.conversations();
    expect(all.map(({ id }) => id)).toEqual(['new', 'old']);
    expect(all[0]?.params).toEqual({ ...DEFAULT_PARAMS, temperature: 1 });
  });

  it('never loads a streaming mark', async () => {
    await store.saveMessages(message('m1', 'old', 'half an ans', { streaming: true }), message('m2', 'old', 'whole'));
    const loaded = await store.messages('old');
    expect(loaded.map(({ streaming }) => streaming)).toEqual([undefined, undefined]);
    expect(loaded.find(({ id }) => id === 'm1')).toMatchObject({ content: 'half an ans', ending: 'interrupted' });
  });

  it('strips the marks from what is stored, once', async () => {
    expect(await store.stripStreaming()).toBe(1);
    expect(await store.stripStreaming()).toBe(0);
    expect((await store.messages('old')).find(({ id }) => id === 'm1')?.ending).toBe('interrupted');
  });

  it('finds text in messages, whatever its case', async () => {
    await store.saveMessages(message('m3', 'new', 'The Lighthouse'));
    expect(await store.search('lightHOUSE')).toEqual(new Set(['new']));
    expect(await store.search('nothing like it')).toEqual(new Set());
  });

  it('deletes a conversation with its messages', async () => {
    await store.deleteConversation('old');
    expect((await store.conversations()).map(({ id }) => id)).toEqual(['new']);
    expect(await store.messages('old')).toEqual([]);
    expect(await store.messages('new')).toHaveLength(1);
  });
});
